"""What ran where and when, as a file that Perfetto and chrome://tracing open."""

import json
from pathlib import Path

from moe_edge.core.files import write_text
from moe_edge.hardware.specs import Cluster

MICRO = 1e6  # the format counts microseconds


class Spans:
    """Collects spans that begin before `until_s`; 0 keeps none.

    Attributes:
      rows: (resource, number, name, start_s, seconds): resource "gpu" or "host" with
        the number of a GPU in the cluster, "link" with sender * N + receiver.
    """

    def __init__(self, until_s: float = 0.0):
        self.until_s = until_s
        self.rows: list[tuple[str, int, str, float, float]] = []

    def add(
        self, resource: str, number: int, name: str, start_s: float, seconds: float
    ) -> None:
        """Appends a span."""
        self.rows.append((resource, number, name, start_s, seconds))


def trace_events(spans: Spans, cluster: Cluster) -> list[dict]:
    """Chrome trace events: a process a server, a thread a GPU or link.

    A network link belongs to the server that sends.
    """
    N = cluster.num_servers
    places = [
        (n, g)
        for n, server in enumerate(cluster.servers)
        for g in range(len(server.gpus))
    ]
    events: list[dict] = []
    for n, server in enumerate(cluster.servers):
        events.append(_named("process_name", n, 0, server.name))
    threads: dict[tuple[int, str], int] = {}
    for resource, number, name, start_s, seconds in spans.rows:
        if resource == "link":
            n, label = number // N, f"link to {cluster.servers[number % N].name}"
        else:
            n, g = places[number]
            label = f"GPU {g}" if resource == "gpu" else f"host link of GPU {g}"
        thread = threads.get((n, label))
        if thread is None:
            thread = threads[n, label] = len(threads) + 1
            events.append(_named("thread_name", n, thread, label))
        events.append(
            {
                "name": name,
                "ph": "X",
                "pid": n,
                "tid": thread,
                "ts": start_s * MICRO,
                "dur": seconds * MICRO,
            }
        )
    return events


def write_timeline(path: str | Path, spans: Spans, cluster: Cluster) -> None:
    """Writes a Chrome trace (JSON), for ui.perfetto.dev."""
    content = {"traceEvents": trace_events(spans, cluster), "displayTimeUnit": "ms"}
    write_text(path, json.dumps(content))


def _named(kind: str, process: int, thread: int, name: str) -> dict:
    return {
        "name": kind,
        "ph": "M",
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }
