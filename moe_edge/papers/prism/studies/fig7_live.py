"""Prism, figure 7, live: every server's data changes half way; with migration, without.

All requests come at once and each server runs one after another, so a request's time
is from the end of the one before it. All runs of a seed begin with the same placement,
made for no data in particular. The paper's rule keeps all statistics (keep 1).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from moe_edge.bench.live import read_lines, token_times_s
from moe_edge.bench.registry import later
from moe_edge.bench.settings import FromZero, Positive, Share, known
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError, MoeEdgeError, check_known
from moe_edge.metrics.frames import frame
from moe_edge.papers.prism.studies.live_seeds import (
    LiveServers,
    PlacerName,
    check_cluster,
)
from moe_edge.papers.prism.studies.live_shares import queued_s, request_spans
from moe_edge.papers.prism.studies.live_tokens import local_by_request
from moe_edge.papers.prism.studies.served import PRISM
from moe_edge.place.migrate import SOURCES
from moe_edge.training.generators import FAMILIES, examples
from moe_edge.workload.cluster_run import method_file

WITHOUT = "no migration"
PARTS = "all", "before", "after"  # of a server's requests
NEVER_S = 1e6  # a period that no run reaches: the same spare slots, no decision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure7Live(LiveServers):
    """`LiveServers` names the rest.

    Attributes:
      then_workload: a task family a server, of its second half of requests.
      requests_per_server: of each half.
      method: the placer.
      period_s: between two decisions on migration.
      keeps: share of the statistics kept at each decision; a run each, and one without
        migration.
      hysteresis: gain that a new placement must promise, as a share.
      source: where migrating blocks come from: host or network.
    """

    requests_per_server: int = 14
    seeds: int = 2
    then_workload: str = "stories,arithmetic,words"
    method: PlacerName = PRISM
    period_s: Positive = 3.0
    keeps: Sequence[Share] = (1.0, 0.5)
    hysteresis: FromZero = 0.0
    source: Annotated[str, known("source", SOURCES)] = "host"

    def variants(self) -> dict[str, float | None]:
        """Names of a seed's runs: what each keeps; None: nothing moves."""
        return {WITHOUT: None} | {f"keep {keep:g}": keep for keep in self.keeps}

    def halves(self) -> list[tuple[str, str]]:
        """Of every server, the families of its two halves."""
        both = self.workload.split(","), self.then_workload.split(",")
        return list(zip(*both, strict=True))

    def run(self, seed: int, prompts: str, keep: float | None) -> dict[str, Any]:
        """Options of a run."""
        return {
            "servers": self.servers,
            "slots": self.slots,
            "methods": self.method,
            "prompts": prompts,
            "max_new_tokens": self.output_tokens,
            "link_mbps": self.link_mbps,
            "period_s": NEVER_S if keep is None else self.period_s,
            "keep": 1.0 if keep is None else keep,
            "hysteresis": self.hysteresis,
            "source": self.source,
            "seed": seed,
        }


def check(settings: Figure7Live) -> None:
    """Refuses a cluster that cannot be, and servers whose data does not change."""
    counts = [len(w.split(",")) for w in (settings.workload, settings.then_workload)]
    if counts[0] != counts[1]:
        raise ConfigError(
            f"then_workload names {counts[1]} task families, expected one for each of "
            f"the {counts[0]} servers of workload"
        )
    for families in settings.halves():
        for family in families:
            check_known("task family", family, FAMILIES)
        if families[0] == families[1]:
            raise ConfigError(
                f"a server has {families[0]!r} in workload and in then_workload; "
                "expected other data in its second half"
            )
    check_cluster(settings.run(settings.seed, __file__, None))  # any file that exists


def write_prompts(settings: Figure7Live, seed: int, path: Path) -> None:
    """Questions of both halves, server by server in the order in which they run."""
    lines, count = [], settings.requests_per_server
    for server, families in enumerate(settings.halves()):
        for half, family in enumerate(families):
            made = examples(family, f"prism_fig7_live/{seed}/{server}/{half}", count)
            for number, one in enumerate(made):
                name = f"{family}/{server}/{half}/{number}"
                line = {"id": name, "prompt": f"{one.question}\nAnswer:"}
                lines.append(json.dumps(line | {"server": server}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Changed:
    """A run whose data changed.

    Attributes:
      seconds_NR: of each server's requests, in order; half of them are of the new data.
      local_NR: likewise, share of pairs computed at home.
      during_s, others_s: of decoded tokens, while blocks moved and otherwise.
      migrations, moved: placements taken, blocks moved.
      moving_s: seconds in which blocks moved.
    """

    seconds_NR: np.ndarray
    local_NR: np.ndarray
    during_s: Sequence[float]
    others_s: Sequence[float]
    migrations: int
    moved: int
    moving_s: float

    def means(self) -> dict[str, float]:
        """Mean seconds and local ratio of all requests and of each half."""
        half = self.seconds_NR.shape[1] // 2
        spans = slice(None), slice(half), slice(half, None)
        tables = {"seconds": self.seconds_NR, "local": self.local_NR}
        return {
            f"{name} {part}": float(table_NR[:, rows].mean())
            for name, table_NR in tables.items()
            for part, rows in zip(PARTS, spans, strict=True)
        }


def changed(settings: Figure7Live, folder: Path, facts: Mapping[str, Any]) -> Changed:
    """What the files of a run say."""
    method = settings.method
    events = read_lines(folder / method_file("events", method))
    changes = read_lines(folder / method_file("migrations", method))
    moves = [(one["begun_s"], one["t_s"]) for one in changes if one["moves"]]
    spans = request_spans(events)
    queue_s = queued_s(spans)
    shape = settings.servers, 2 * settings.requests_per_server
    if sorted(spans) != list(range(shape[0] * shape[1])):
        raise MoeEdgeError(
            f"{folder}: {len(spans)} requests in the events, expected "
            f"{shape[0] * shape[1]}"
        )
    seconds = [end - begun - queue_s[r] for r, (_, begun, end) in sorted(spans.items())]
    row = facts["rows"][method]
    return Changed(
        np.array(seconds).reshape(shape),
        local_by_request(folder, method).reshape(shape),
        *token_times_s(events, moves),
        row["migrations"],
        row["moved_blocks"],
        sum(end - begun for begun, end in moves),
    )


FRAMES = {
    "parts": frame("variant part", "seconds:s local over"),
    "moves": frame("variant", "migrations moved moving_s"),
    "requests": frame("variant request", "seconds:s local"),
    "tokens": frame("who when", "p99_ms"),
}
STUDY = Study(
    "prism_fig7_live",
    Figure7Live,
    later("papers.prism.studies.fig7_live_runs.measure"),
    FRAMES,
    later("papers.prism.studies.fig7_live_runs.derive"),
    check=check,
    start={"seeds": 1},
)
