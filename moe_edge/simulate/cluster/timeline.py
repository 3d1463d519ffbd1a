"""Spans of a simulated run, kept cheaply and written as a Chrome trace."""

from pathlib import Path

from moe_edge.core.chrome_trace import Span, write_chrome_trace
from moe_edge.hardware.specs import Cluster


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
        """Appends a span that begins early enough."""
        if start_s < self.until_s:
            self.rows.append((resource, number, name, start_s, seconds))


def write_timeline(path: str | Path, spans: Spans, cluster: Cluster) -> None:
    """Writes a Chrome trace (JSON), for ui.perfetto.dev.

    A group a server; in it a track a GPU, host link or link to another server. A
    network link belongs to the server that sends.
    """
    servers, N, found = cluster.servers, cluster.num_servers, []
    places = [(n, g) for n in range(N) for g in range(len(servers[n].gpus))]
    for resource, number, name, start_s, seconds in spans.rows:
        if resource == "link":
            n, track = number // N, f"link to {servers[number % N].name}"
        else:
            n, g = places[number]
            track = f"GPU {g}" if resource == "gpu" else f"host link of GPU {g}"
        found.append(Span(servers[n].name, track, name, start_s, seconds))
    write_chrome_trace(path, found)
