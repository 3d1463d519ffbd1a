"""Decoded tokens of a live run, from its files: how long each took, and who computed.

The k-th decode step of a request in the trace is its token k in the events: a prompt
gives token 0. A token lasts from the one before it until the scheduler knew it.
"""

import dataclasses
from pathlib import Path

import numpy as np

from moe_edge.bench.live import read_lines
from moe_edge.core.checks import MoeEdgeError
from moe_edge.workload.cluster_run import method_file
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import DECODE


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Decoded tokens, request by request.

    Attributes:
      request_T: whose.
      begun_T, end_T: seconds from the start of the run.
      remote_T: share of its (token, block) pairs that others computed.
    """

    request_T: np.ndarray
    begun_T: np.ndarray
    end_T: np.ndarray
    remote_T: np.ndarray

    @property
    def seconds_T(self) -> np.ndarray:
        return self.end_T - self.begun_T


def read_tokens(folder: Path, method: str) -> Tokens:
    """The decoded tokens of a method's run.

    Raises:
      MoeEdgeError: the trace has other steps than the events have tokens.
    """
    trace = read_trace(folder / method_file("trace", method))
    away_T = (trace.ids_TK >= 0) & (trace.holder_TK != trace.server[:, None])
    rows = np.flatnonzero(trace.phase == DECODE)
    keys_T2 = np.stack([trace.request[rows], trace.step[rows]], axis=1)
    steps_U2, token_T = np.unique(keys_T2, axis=0, return_inverse=True)
    token_T = token_T.reshape(-1)
    layers_U = np.bincount(token_T)
    shares_T = away_T[rows].sum(axis=1) / (trace.ids_TK[rows] >= 0).sum(axis=1)
    spans = np.array(
        sorted(
            (e["request"], e["step"], e["server"], e["t_s"], e["t_s"] + e["dur_s"])
            for e in read_lines(folder / method_file("events", method))
            if e["kind"] == "compute" and e["step"]
        )
    ).reshape(-1, 5)
    if not np.array_equal(spans[:, 0], steps_U2[:, 0]):
        raise MoeEdgeError(
            f"{folder}: {len(spans)} decoded tokens in the events of {method}, "
            f"{len(steps_U2)} in its trace, or other requests; was a server lost?"
        )
    return Tokens(
        spans[:, 0].astype(int),
        spans[:, 3],
        spans[:, 4],
        np.bincount(token_T, shares_T) / layers_U,
    )


def local_by_request(folder: Path, method: str) -> np.ndarray:
    """float64 [R]: of each request, its pairs that its own server computed."""
    trace = read_trace(folder / method_file("trace", method))
    chosen_TK = trace.ids_TK >= 0
    home_TK = chosen_TK & (trace.holder_TK == trace.server[:, None])
    home_R = np.bincount(trace.request, home_TK.sum(axis=1))
    return home_R / np.bincount(trace.request, chosen_TK.sum(axis=1))
