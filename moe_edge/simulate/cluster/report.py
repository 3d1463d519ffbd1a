"""Results of a simulated run: latencies, local ratio, bytes, utilisation; as text."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_edge.core.checks import MoeEdgeError
from moe_edge.simulate.cluster.links import CAUSES
from moe_edge.simulate.cluster.loop import ClusterLoop
from moe_edge.workload.cluster_run import RequestRow


class ClusterResult:
    """A finished run.

    Attributes:
      latency_R, first_R: float64 [R], seconds from a request's arrival to its last and
        its first token.
      server_R, domain_R, arrival_R: where, of which domain and when it came.
      ratio_W: float64 [windows], share of (token, block) pairs computed on the server
        that asked; NaN in a window without any.
      local_pairs, pairs: in all.
      remote_calls: blocks asked of other servers, one a step, layer and block.
      bytes_NN: cause -> int64 [N, N] bytes from server to server.
      host_bytes_G: int64 [G], copied from host memory to each GPU.
      gpu_use_G, link_use: share of the run in which each was busy.
      counts_NX: int64 [N, L * E], pairs asked for.
      end_s: of the last token or job of a GPU or link.
      events, steps: how many.
      facts: what only some runs have (migrations, peak_memory, hits, redirected).
    Raises:
      MoeEdgeError: the loop has not run to its end.
    """

    def __init__(self, loop: ClusterLoop):
        if loop.unfinished:
            raise MoeEdgeError(
                f"{loop.unfinished} requests are not finished; call run()"
            )
        requests, links = loop.requests, loop.links
        self.arrival_R = np.array([request.arrival_s for request in requests])
        self.latency_R = loop.finish_R - self.arrival_R
        self.first_R = loop.first_R - self.arrival_R
        self.server_R = np.array([request.server for request in requests])
        self.domain_R = tuple(request.domain for request in requests)
        pairs_WN2 = np.array(loop.windows, np.int64)
        local_W, all_W = pairs_WN2.sum(axis=1).T
        empty_W = np.full(len(all_W), np.nan)
        self.ratio_W = np.divide(local_W, all_W, out=empty_W, where=all_W > 0)
        self.window_s = loop.options.window_s
        self.local_pairs, self.pairs = pairs_WN2.sum(axis=(0, 1)).tolist()
        self.remote_calls = loop.remote_blocks
        self.bytes_NN = {cause: links.bytes_NN(cause) for cause in CAUSES}
        self.host_bytes_G = np.array(links.host_bytes, np.int64)
        self.end_s = max(float(loop.finish_R.max()), links.end_s)
        span_s = max(self.end_s, 1e-12)
        self.gpu_use_G = np.array(links.gpu_busy) / span_s
        self.link_use = np.array(links.link_busy) / span_s
        self.counts_NX = loop.counts_NX
        self.events, self.steps = loop.events, loop.steps
        self.facts: dict[str, Any] = {}
        for part in loop.parts:
            self.facts |= part.facts()

    @property
    def num_servers(self) -> int:
        return len(self.counts_NX)

    @property
    def mean_latency_s(self) -> float:
        """Over all requests."""
        return float(self.latency_R.mean())

    @property
    def latency_s_N(self) -> list[float | None]:
        """Mean of the requests that arrived at each server; None without any."""
        by_server = [
            self.latency_R[self.server_R == n] for n in range(self.num_servers)
        ]
        return [float(mine.mean()) if len(mine) else None for mine in by_server]

    @property
    def local_ratio(self) -> float:
        return self.local_pairs / self.pairs

    @property
    def served(self) -> list[RequestRow]:
        """A line a request, for pictures of latency over time."""
        columns = (self.arrival_R, self.first_R, self.latency_R)
        seconds = zip(*(column.tolist() for column in columns), strict=True)
        who = zip(self.server_R.tolist(), self.domain_R, seconds, strict=True)
        return [RequestRow(server, domain, *times) for server, domain, times in who]

    def row(self) -> dict[str, Any]:
        """The keys of the last line of stdout, and a few more."""
        return {
            "latency_s_N": self.latency_s_N,
            "mean_latency_s": self.mean_latency_s,
            "p95_latency_s": float(np.quantile(self.latency_R, 0.95)),
            "mean_first_token_s": float(self.first_R.mean()),
            "local_ratio": self.local_ratio,
            "remote_calls": self.remote_calls,
            "network_bytes": {c: int(sent.sum()) for c, sent in self.bytes_NN.items()},
            "host_bytes": int(self.host_bytes_G.sum()),
            "gpu_use": float(self.gpu_use_G.mean()),
            "busiest_line_use": float(self.link_use.max()),
            "end_s": self.end_s,
            "events": self.events,
            **self.facts,
        }


def progress(name: str, seed: int, result: ClusterResult, took_s: float) -> str:
    """One line while people wait."""
    return (
        f"{name}, seed {seed}: {result.mean_latency_s:.3f} s a request, "
        f"{result.events} events in {took_s:.1f} s"
    )


def print_table(rows: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, str]):
    """The comparison for people; many servers are summed up."""
    shown = min(len(next(iter(rows.values()))["latency_s_N"]), 4)
    heads = "".join(f"{f'server {n} s':>12}" for n in range(shown))
    print("latency of a request by server and in the mean; calls to experts by place")
    print(f"{'method':20}{heads}{'mean s':>10}{'local %':>9}{'remote calls':>14}")
    for name, row in rows.items():
        cells = "".join(
            f"{'-' if s is None else format(s, '.3f'):>12}"
            for s in row["latency_s_N"][:shown]
        )
        print(
            f"{name:20}{cells}{row['mean_latency_s']:10.3f}"
            f"{100 * row['local_ratio']:9.1f}{row['remote_calls']:14.0f}"
        )
    for name, reason in left_out.items():
        print(f"{name:20}left out: {reason}")
