"""Where the time of requests went in a live run of the cluster, from its files.

A server runs one request at a time. From its arrival a request waits for those before
it; then it waits for calls, or its own server computes and prepares. A decode call's
duration less the computation at its server is what messages cost: software, bytes, and
waiting for a core.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
    path = folder / method_file("events", method)
    lines = path.read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    spans = _requests(events)
    total_s = sum(end - begun for _, begun, end in spans)
    waited_s, layers = _waits(events)
    messages_s = min(layers * (row["call_overhead_s"] or 0.0), waited_s)
    queue_s = _queue_s(spans)
    seconds = {
        QUEUE: queue_s,
        OWN: total_s - queue_s - waited_s,
        OTHERS: waited_s - messages_s,
        MESSAGES: messages_s,
    }
    return {part: seconds[part] / total_s for part in PARTS}


def _requests(events) -> list[tuple[int, float, float]]:
    """(server, arrival, last token) of every request."""
    found: dict[int, tuple[int, float, float]] = {}
    for event in events:
        if event["kind"] == "compute":
            begun_s, end_s = event["t_s"], event["t_s"] + event["dur_s"]
            _, first_s, last_s = found.get(event["request"], (0, begun_s, end_s))
            span = event["server"], min(first_s, begun_s), max(last_s, end_s)
            found[event["request"]] = span
    return list(found.values())


def _queue_s(spans) -> float:
    """Seconds between arrivals and the end of the request before, on each server."""
    queued_s, ended_s = 0.0, {}
    for server, begun_s, end_s in sorted(spans, key=lambda span: span[2]):
        before_s = ended_s.get(server, begun_s)
        queued_s += max(0.0, before_s - begun_s)
        ended_s[server] = end_s
    return queued_s


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
