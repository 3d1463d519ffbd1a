"""Where the time of requests went in a live run of the cluster, from its files.

A server runs one request at a time. From its arrival a request waits for those before
it; then it waits for calls, or its own server computes and prepares. A decode call's
duration less the computation at its server is what messages cost: software, bytes, and
waiting for a core.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.live import read_lines
from moe_edge.workload.cluster_run import method_file

QUEUE, OWN = "queue", "own server"
OTHERS, MESSAGES = "others' computation", "messages"
PARTS = (QUEUE, OWN, OTHERS, MESSAGES)


def time_shares(folder: Path, method: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the requests' time in all, one of each of PARTS; they sum to 1.

    Args:
      folder: of the run.
      row: of the method, whose `call_overhead_s` counts once a layer with calls.
    """
    events = read_lines(folder / method_file("events", method))
    spans = request_spans(events)
    total_s = sum(end - begun for _, begun, end in spans.values())
    waited_s, layers = _waits(events)
    messages_s = min(layers * (row["call_overhead_s"] or 0.0), waited_s)
    queue_s = sum(queued_s(spans).values())
    seconds = {
        QUEUE: queue_s,
        OWN: total_s - queue_s - waited_s,
        OTHERS: waited_s - messages_s,
        MESSAGES: messages_s,
    }
    return {part: seconds[part] / total_s for part in PARTS}


def request_spans(events) -> dict[int, tuple[int, float, float]]:
    """(server, arrival, last token) of every request."""
    found: dict[int, tuple[int, float, float]] = {}
    for event in events:
        if event["kind"] == "compute":
            begun_s, end_s = event["t_s"], event["t_s"] + event["dur_s"]
            _, first_s, last_s = found.get(event["request"], (0, begun_s, end_s))
            span = event["server"], min(first_s, begun_s), max(last_s, end_s)
            found[event["request"]] = span
    return found


def queued_s(spans: Mapping[int, tuple[int, float, float]]) -> dict[int, float]:
    """Of every request, seconds from its arrival to the end of the one before it on
    its server."""
    found, ended_s = {}, {}
    for request, (server, begun_s, end_s) in sorted(
        spans.items(), key=lambda item: item[1][2]
    ):
        found[request] = max(0.0, ended_s.get(server, begun_s) - begun_s)
        ended_s[server] = end_s
    return found


def _waits(events) -> tuple[float, int]:
    """Seconds in which requests waited for calls, and of how many layers; the calls of
    a layer run at the same time."""
    waited_s, layers = 0.0, 0
    by_request: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["kind"] == "call":
            span = event["t_s"], event["t_s"] + event["dur_s"]
            by_request.setdefault(event["request"], []).append(span)
    for spans in by_request.values():
        begun_C, end_C = np.array(sorted(spans)).T
        reached_C = np.maximum.accumulate(end_C)
        new_C = np.append(True, begun_C[1:] >= reached_C[:-1])
        first = np.flatnonzero(new_C)
        last = np.append(first[1:], len(new_C)) - 1
        waited_s += float((reached_C[last] - begun_C[first]).sum())
        layers += len(first)
    return waited_s, layers
