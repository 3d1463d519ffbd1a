"""Suite `cluster`: whole live runs: bytes, start-up, migration and losses."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.live import (
    kept_compiled,
    live_run,
    read_lines,
    token_times_s,
)
from moe_edge.bench.speed import MS, Models, Rows, make_row
from moe_edge.core.checks import MoeEdgeError
from moe_edge.studies.speed.cluster import ClusterSettings
from moe_edge.training.generators import examples
from moe_edge.workload.cluster_run import method_file

FAMILIES = ("arithmetic", "words", "stories")  # one a server
METHOD = "optimal"
PAYLOAD_BAR, INTERFACE_BAR, TAIL_BAR = 1.05, 1.15, 2.0
START_S, RESUME_S = 30.0, 5.0
NOTICE_S = {"kill": 0.5, "stop": 3.0}
DRILL_TOKENS, HUNG_S = 40, 2.0  # limits of a stopped server's loss go by this silence


def prompts_file(work_dir: Path, count: int) -> Path:
    """So many questions of a task family a server, always the same."""
    path, lines = work_dir / "prompts.jsonl", []
    for server, family in enumerate(FAMILIES):
        made = examples(family, f"benchmark/cluster/{server}", count)
        for number, one in enumerate(made):
            line = {"id": f"{family}/{number}", "prompt": f"{one.question}\nAnswer:"}
            lines.append(json.dumps(line | {"server": server}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def run(settings: ClusterSettings, work_dir: Path, name: str, count=None, **options):
    """cluster.json of a live run and its folder; with `start_s`, until all compiled.

    Args:
      count: requests of a server; None: as the settings say.
    """
    folder, began_at = work_dir / "live" / name, time.time()
    count = settings.requests_per_server if count is None else count
    given = {
        "prompts": str(prompts_file(work_dir, count)),
        "max_new_tokens": settings.new_tokens,
        "servers": len(FAMILIES),
        "methods": METHOD,
    }
    with kept_compiled(work_dir / "compiled"):
        facts = live_run(folder, **given | options)
    facts["start_s"] = facts["ready_at"] - began_at
    print(
        f"live run {name}: ready after {facts['start_s']:.1f} s, "
        f"{time.time() - began_at:.1f} s in all",
        flush=True,
    )
    return facts, folder


def compiled_row(name: str, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Programs that servers compiled while they served."""
    counts = [one["compiled_after_warmup"] for one in facts]
    return make_row(f"compiled after warm-up, {name}; none is right", counts, "1")


def bytes_rows(settings: ClusterSettings, work_dir: Path, _models: Models) -> Rows:
    """What is handed to the transport, and what the interface sends on a slow line."""
    mbps = settings.link_mbps
    facts, _ = run(settings, work_dir, "bytes", link_mbps=float(mbps))
    row = facts["rows"][METHOD]
    needed = {
        "peer": [row["activation_bytes"] / 1e6],
        "peer_name": "hidden states and rows",
        "emulated": True,
    }
    found = {
        "payload": (row["payload_bytes"], PAYLOAD_BAR),
        f"interface at {mbps} Mbit/s": (row["interface_bytes"], INTERFACE_BAR),
    }
    return [
        make_row(f"bytes, {name}", [size / 1e6], "MB", bar=bar, **needed)
        for name, (size, bar) in found.items()
    ] + [compiled_row("slow line", [facts])]


def migration_rows(settings: ClusterSettings, work_dir: Path, _models: Models) -> Rows:
    """A token's time while blocks move, against other tokens of the same run."""
    mbps = settings.link_mbps
    facts, folder = run(
        *(settings, work_dir, "migration"),
        link_mbps=float(mbps),
        source="network",
        period_s=settings.period_s,
    )
    events = read_lines(folder / method_file("events", METHOD))
    changes = read_lines(folder / method_file("migrations", METHOD))
    spans = [(one["begun_s"], one["t_s"]) for one in changes if one["moves"]]
    moved_ms = [MS * e["dur_s"] for e in events if e["kind"] == "transfer"]
    during_s, without_s = token_times_s(events, spans)
    if not during_s or not without_s:
        raise MoeEdgeError(
            f"{len(during_s)} tokens came while blocks moved and {len(without_s)} "
            f"while none did, of {facts['rows'][METHOD]['moved_blocks']} blocks; "
            "expected some of both: ask for more requests or another period_s"
        )
    ideal_ms = MS * 8 * facts["block_bytes"] / (mbps * 1e6)
    emulated = {"emulated": True, "moved_blocks": len(moved_ms)}
    return [
        make_row(
            "token, p99, while blocks move",
            [MS * float(np.quantile(during_s, 0.99))],
            "ms",
            peer=[MS * float(np.quantile(without_s, 0.99))],
            peer_name="tokens of the same run without",
            bar=TAIL_BAR,
            tokens=[len(during_s), len(without_s)],
            **emulated,
        ),
        make_row(
            f"block while all serve, {mbps} Mbit/s",
            [float(np.median(moved_ms))],
            "ms",
            peer=[ideal_ms],
            peer_name="the line's rate",
            **emulated,
        ),
        compiled_row("migration", [facts]),
    ]


def loss_rows(settings: ClusterSettings, work_dir: Path, _models: Models) -> Rows:
    """A server is killed, one is stopped; both runs started with a warm cache.

    Each server has one request and takes turns with that of a lost one, which so waits
    for nothing but its replay.
    """
    rows, all_facts = [], []
    if not (work_dir / "live").exists():  # no other run has compiled yet
        run(settings, work_dir, "warm")
    for kind, limit_s in NOTICE_S.items():
        drill = f"{kind}:1@{DRILL_TOKENS}"
        struck = {"drill": drill, "max_batch": 2, "hung_s": HUNG_S}
        facts, _ = run(settings, work_dir, kind, 1, **struck)
        all_facts.append(facts)
        if not facts["failures"]:
            raise MoeEdgeError(f"drill {drill} struck nobody; ask for more tokens")
        failure = facts["failures"][0]
        noticed_s, resumed_s = (
            failure[key] - failure["struck_s"] for key in ("detected_s", "resumed_s")
        )
        more = {"lost_requests": facts["lost_requests"]}
        rows.append(make_row(f"{kind}, noticed", [noticed_s], "s", limit=limit_s))
        rows.append(
            make_row(
                f"{kind}, its request goes on", [resumed_s], "s", limit=RESUME_S, **more
            )
        )
    started_s = [facts["start_s"] for facts in all_facts]
    start = make_row("start of four processes, warm", started_s, "s", limit=START_S)
    return [start, *rows, compiled_row("losses", all_facts)]
