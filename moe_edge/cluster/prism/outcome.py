"""What a method leaves: a row of the summary and its files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.cluster.prism.method import MethodRun
from moe_edge.cluster.scheduler.programme import served_rows
from moe_edge.cluster.scheduler.serving import ServingResult
from moe_edge.cluster.transport.wire import Kind
from moe_edge.core.events import Event, write_events
from moe_edge.place.plan import Placement
from moe_edge.workload.cluster_run import (
    join_traces,
    method_file,
    write_migrations,
    write_requests,
)
from moe_edge.workload.trace_writer import write_trace
from moe_edge.workload.traces import ordered_trace

# Columns of a server's calls (`Ledger.calls`).
SENT, DURATION, CALLEE, LAYER, REQUEST, PAIRS, STATES, ROWS, BYTES, IN_DECODE = range(
    10
)


def served_row(run: ServingResult, servers: int) -> dict[str, Any]:
    """How long requests took; keys: interfaces of the cluster."""
    served = served_rows(run.asked)
    latency_R = np.array([row.latency_s for row in served])
    server_R = np.array([row.server for row in served])
    done_R = ~np.isnan(latency_R)
    tokens = sum(len(one.tokens) for one in run.asked)
    ended_s = max((one.times_s[-1] for one in run.asked if one.times_s), default=0.0)
    by_server = [latency_R[done_R & (server_R == n)] for n in range(servers)]
    return {
        "latency_s_N": [float(m.mean()) if len(m) else None for m in by_server],
        "mean_latency_s": float(latency_R[done_R].mean()) if done_R.any() else None,
        "p95_latency_s": (
            float(np.quantile(latency_R[done_R], 0.95)) if done_R.any() else None
        ),
        "tokens_per_s": tokens / (ended_s - run.begun_s) if tokens else 0.0,
        "notes_missing": run.notes_missing,
        **substituted(run),
    }


def substituted(run: ServingResult) -> dict[str, float]:
    """Share of a lossy route's choices that it changed; nothing without one."""
    facts = [note for note, _ in run.notes.values()]
    routed = sum(note["routed"] for note in facts)
    if not routed:
        return {}
    return {"substituted_share": sum(note["substituted"] for note in facts) / routed}


def alone_row(run: ServingResult, servers: int) -> dict[str, Any]:
    """The numbers of servers that asked nobody: all is computed at home."""
    facts = [note for note, _ in run.notes.values()]
    hits, misses, host_bytes = (
        sum(note[name] for note in facts) for name in ("hits", "misses", "host_bytes")
    )
    return served_row(run, servers) | {
        "local_ratio": 1.0,
        "remote_calls": 0,
        "hit_ratio": hits / (hits + misses) if hits + misses else None,
        "host_bytes": host_bytes,
        "redirected": sum(one.passed_on for one in run.asked),
        "payload_bytes": payload_bytes(facts),
        "activation_bytes": 0,
        "interface_bytes": interface_bytes(facts),
        "call_overhead_s": None,
        "migrations": 0,
        "moved_blocks": 0,
    }


def summary_row(run: MethodRun, d_model: int) -> dict[str, Any]:
    """The numbers of a method that places blocks."""
    facts = [note for note, _ in run.notes.values()]
    total = {
        name: sum(note[name] for note in facts)
        for name in ("states", "rows", "pairs", "local_pairs", "remote_blocks")
    }
    pairs = total["pairs"]
    return served_row(run, len(run.keeper.held_NLE)) | {
        "local_ratio": total["local_pairs"] / pairs if pairs else None,
        "remote_calls": total["remote_blocks"],
        "payload_bytes": payload_bytes(facts),
        "activation_bytes": 4 * d_model * (total["states"] + total["rows"]),
        "interface_bytes": interface_bytes(facts),
        "call_overhead_s": call_overhead_s(run),
        "migrations": sum(decision["adopt"] for decision in run.decisions),
        "moved_blocks": run.keeper.table.moved,
    }


def payload_bytes(facts: Sequence[dict]) -> int:
    """All that was handed to the transport for calls and their answers."""
    kinds = {int(Kind.CALL), int(Kind.ROWS)}
    return sum(
        size
        for note in facts
        for key, (_, size) in note["sent"].items()
        if int(key.split(":")[1]) in kinds
    )


def interface_bytes(facts: Sequence[dict]) -> int | None:
    """All that servers sent, headers of packets included; None if nobody counts it."""
    counts = [note["interface"] for note in facts]
    return None if not counts or None in counts else sum(counts)


def calls_of(run: MethodRun) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Of every server: its calls in order, and seconds that each took its callee.

    Calls of one caller are answered in their order, so the n-th call to a server is the
    n-th that it answered for this caller; NaN where it noted another number.
    """
    found = {}
    for caller, (_, arrays) in run.notes.items():
        calls = arrays["calls"][np.argsort(arrays["calls"][:, SENT], kind="stable")]
        seconds_C = np.full(len(calls), np.nan)
        for callee, (_, theirs) in run.notes.items():
            mine = calls[:, CALLEE] == callee
            spent = theirs["answered"][theirs["answered"][:, 2] == caller]
            if mine.sum() == len(spent):
                seconds_C[mine] = spent[:, 1]
        found[caller] = calls, seconds_C
    return found


def call_overhead_s(run: MethodRun) -> float | None:
    """Median of a decode call's duration minus the computation at its server."""
    found = [np.zeros(0)]
    for calls, seconds_C in calls_of(run).values():
        known = (calls[:, IN_DECODE] == 1) & ~np.isnan(seconds_C)
        found.append((calls[:, DURATION] - seconds_C)[known])
    overheads = np.concatenate(found)
    return float(np.median(overheads)) if len(overheads) else None


def trace_of(run: MethodRun, num_experts: int, top_k: int):
    """The route trace of all servers, or None if nobody looked anything up."""
    traces = []
    for server, (_, arrays) in sorted(run.notes.items()):
        rows = {
            name.removeprefix("lookups_"): array
            for name, array in arrays.items()
            if name.startswith("lookups_")
        }
        if len(rows["step"]):
            rows["server"] = np.full(len(rows["step"]), server, np.int32)
            traces.append(ordered_trace(num_experts, top_k, **rows))
    return join_traces(traces) if traces else None


def token_events(run: ServingResult) -> list[Event]:
    """Failures and every token; seconds from the start of the run.

    A token's event (`compute`, with its step) lasts from the one before it, or from the
    request's arrival, until the scheduler knew it.
    """
    events = []
    for one in run.asked:
        last_s = one.arrived_s
        for step, (time_s, by) in enumerate(zip(one.times_s, one.made_by, strict=True)):
            at = {"request": one.id, "step": step, "server": by}
            events.append(Event(last_s - run.begun_s, time_s - last_s, "compute", **at))
            last_s = time_s
    for failure in run.failures:
        events.append(Event(failure.detected_s, 0.0, "fail", server=failure.server))
    return events


def events_of(run: MethodRun) -> list[Event]:
    """The same, and calls and migrations."""
    events = token_events(run)
    for server, (_, arrays) in run.notes.items():
        shift_s = run.offsets_s.get(server, 0.0) + run.begun_s
        for call in arrays["calls"].tolist():
            events.append(
                Event(
                    t_s=call[SENT] - shift_s,
                    dur_s=call[DURATION],
                    kind="call",
                    request=int(call[REQUEST]),
                    layer=int(call[LAYER]),
                    server=int(call[CALLEE]),
                    bytes=int(call[BYTES]),
                )
            )
        for began_s, seconds, layer, block, _ in arrays["brought"].tolist():
            events.append(
                Event(
                    t_s=began_s - shift_s,
                    dur_s=seconds,
                    kind="transfer",
                    cause="migrate",
                    layer=int(layer),
                    expert=int(block),
                    server=server,
                )
            )
    return events


def write_served(
    folder: Path, name: str, run: ServingResult, events: Sequence[Event]
) -> None:
    """What every method writes: its requests, and what happened."""
    write_requests(folder / method_file("requests", name), served_rows(run.asked))
    write_events(folder / method_file("events", name), events)


def write_method(
    folder: Path, name: str, run: MethodRun, num_experts: int, top_k: int
) -> None:
    """All files of a method that places blocks."""
    write_served(folder, name, run, events_of(run))
    placement = Placement(np.where(run.keeper.start_NLE, 0, -1))
    placement.save(folder / method_file("placement", name), {"method": name})
    changes = folder / method_file("migrations", name)
    write_migrations(changes, run.keeper.table.changes)
    trace = trace_of(run, num_experts, top_k)
    if trace is not None:
        write_trace(folder / method_file("trace", name), trace)


def told(name: str, row: Mapping[str, Any]) -> str:
    """A method's row in one sentence."""
    latency_s, local = row["mean_latency_s"], row["local_ratio"]
    if latency_s is None:
        return f"{name}: no request was finished"
    text = f"{name}: {latency_s:.3f} s a request"
    if local is None:
        return text
    return f"{text}, {100 * local:.1f} % of the calls to experts stayed on their server"
