"""What a simulated run amounts to: latencies, local ratio, bytes, utilisation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_edge.core.checks import MoeEdgeError
from moe_edge.simulate.cluster.lines import CAUSES
from moe_edge.simulate.cluster.loop import ClusterLoop
from moe_edge.simulate.cluster.migration import MigratingLoop
from moe_edge.simulate.cluster.offload import OffloadLoop


@dataclasses.dataclass(frozen=True)
class ClusterResult:
    """A finished run.

    Attributes:
      latency_R: float64 [R], seconds from a request's arrival to its last token.
      first_R: float64 [R], to its first token.
      server_R: int64 [R], the server at which it arrived.
      domain_R: names.
      arrival_R: float64 [R].
      ratio_W: float64 [windows], share of (token, block) pairs computed on the server
        that asked; NaN in a window without any.
      ratio_NW: the same for each server.
      window_s: width of a window.
      local_pairs, pairs: in all.
      remote_calls: blocks asked of other servers, one a step, layer and block.
      bytes_NN: cause -> int64 [N, N] bytes from server to server.
      host_bytes_G: int64 [G], copied from host memory to each GPU.
      gpu_use_G, line_use, host_use_G: share of the run in which each was busy.
      counts_NX: int64 [N, L * E], pairs asked for.
      end_s: of the last token or job of a GPU, line or host link.
      events, steps: how many.
      facts: what only some runs have (migrations, peak_memory, hits, redirected).
    """

    latency_R: np.ndarray
    first_R: np.ndarray
    server_R: np.ndarray
    domain_R: tuple[str, ...]
    arrival_R: np.ndarray
    ratio_W: np.ndarray
    ratio_NW: np.ndarray
    window_s: float
    local_pairs: int
    pairs: int
    remote_calls: int
    bytes_NN: Mapping[str, np.ndarray]
    host_bytes_G: np.ndarray
    gpu_use_G: np.ndarray
    line_use: np.ndarray
    host_use_G: np.ndarray
    counts_NX: np.ndarray
    end_s: float
    events: int
    steps: int
    facts: Mapping[str, Any]

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
        means = []
        for n in range(self.num_servers):
            mine = self.latency_R[self.server_R == n]
            means.append(float(mine.mean()) if len(mine) else None)
        return means

    @property
    def local_ratio(self) -> float:
        return self.local_pairs / self.pairs

    def row(self) -> dict[str, Any]:
        """The keys of the last line of stdout, and a few more."""
        return {
            "latency_s_N": self.latency_s_N,
            "mean_latency_s": self.mean_latency_s,
            "p95_latency_s": float(np.quantile(self.latency_R, 0.95)),
            "mean_first_token_s": float(self.first_R.mean()),
            "local_ratio": self.local_ratio,
            "remote_calls": self.remote_calls,
            "network_bytes": {
                cause: int(table.sum()) for cause, table in self.bytes_NN.items()
            },
            "host_bytes": int(self.host_bytes_G.sum()),
            "gpu_use": float(self.gpu_use_G.mean()),
            "busiest_line_use": float(self.line_use.max()),
            "end_s": self.end_s,
            "events": self.events,
            **self.facts,
        }


def report(loop: ClusterLoop) -> ClusterResult:
    """Sums up a loop that has run.

    Raises:
      MoeEdgeError: it has not run to its end.
    """
    if loop.unfinished:
        raise MoeEdgeError(f"{loop.unfinished} requests are not finished; call run()")
    requests, lines = loop.requests, loop.lines
    arrival_R = np.array([request.arrival_s for request in requests])
    pairs_WN2 = np.array(loop.windows, np.int64)
    end_s = max(float(loop.finish_R.max()), lines.end_s)
    span_s = max(end_s, 1e-12)
    return ClusterResult(
        latency_R=loop.finish_R - arrival_R,
        first_R=loop.first_R - arrival_R,
        server_R=np.array([request.server for request in requests]),
        domain_R=tuple(request.domain for request in requests),
        arrival_R=arrival_R,
        ratio_W=_ratio(pairs_WN2.sum(axis=1)),
        ratio_NW=_ratio(pairs_WN2).T,
        window_s=loop.options.window_s,
        local_pairs=int(pairs_WN2[..., 0].sum()),
        pairs=int(pairs_WN2[..., 1].sum()),
        remote_calls=loop.remote_blocks,
        bytes_NN={cause: lines.bytes_NN(cause) for cause in CAUSES},
        host_bytes_G=np.array(lines.host_bytes, np.int64),
        gpu_use_G=np.array(lines.gpu_busy) / span_s,
        line_use=np.array(lines.line_busy) / span_s,
        host_use_G=np.array(lines.host_busy) / span_s,
        counts_NX=loop.counts_NX,
        end_s=end_s,
        events=loop.events,
        steps=loop.steps,
        facts=_facts(loop),
    )


def _ratio(pairs: np.ndarray) -> np.ndarray:
    """Local over all pairs along the last axis; NaN where there is none."""
    local, all_pairs = pairs[..., 0], pairs[..., 1]
    empty = np.full(local.shape, np.nan)
    return np.divide(local, all_pairs, out=empty, where=all_pairs > 0)


def _facts(loop: ClusterLoop) -> dict[str, Any]:
    if isinstance(loop, MigratingLoop):
        rows = [
            {"time_s": m.time_s, "done_s": m.done_s, **dataclasses.asdict(m.decision)}
            for m in loop.migrations
        ]
        moved = [row for row in rows if row["adopt"]]
        return {
            "migrations": rows,
            "migrated": len(moved),
            "moved_blocks": sum(row["moves"] for row in moved),
            "peak_memory": loop.peak_memory,
        }
    if isinstance(loop, OffloadLoop):
        return {
            "hit_ratio": loop.hit_ratio,
            "redirected": len(loop.redirected),
        }
    return {}
