"""Which of a router's choices, top-score or low-score, had to be brought (SMoE)."""

from typing import NamedTuple

import numpy as np

from moe_edge.workload.traces import DECODE, Trace


class Brought(NamedTuple):
    """Shares of decoding's choices, which are the router's own: before any route.

    Attributes:
      low: low-score ones among the choices.
      top_absent, low_absent: of the top-score and of the low-score choices, those that
        had to be fetched or computed elsewhere; one that gave way to a substitute had
        not.
      low_of_absent: low-score ones among all that had to.
    """

    low: float
    top_absent: float
    low_absent: float
    low_of_absent: float


def is_top(scores_TE: np.ndarray, own_TK: np.ndarray, a: float) -> np.ndarray:
    """bool `[T, K]`: choices with a score of (1 + a) times the best not chosen."""
    rest_TE = np.array(scores_TE, np.float32)
    np.put_along_axis(rest_TE, own_TK, -1, axis=1)
    bound_T1 = (1 + a) * rest_TE.max(axis=1, keepdims=True)
    return np.take_along_axis(np.float32(scores_TE), own_TK, axis=1) >= bound_T1


def brought(trace: Trace, a: float) -> Brought:
    """What a run had to bring.

    Args:
      trace: with the scores of all experts; every token has K choices, those of the
        highest scores.
      a: SMoE's margin.
    """
    at_T = trace.phase == DECODE
    scores_TE, ids_TK = trace.scores_TE[at_T], trace.ids_TK[at_T]
    own_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, : trace.top_k]
    top_TK = is_top(scores_TE, own_TK, a)
    is_computed_TKK = own_TK[:, :, None] == ids_TK[:, None, :]
    absent_TK = (is_computed_TKK & ~trace.hit_TK[at_T][:, None, :]).any(axis=2)
    absent, low_absent = absent_TK.sum(), absent_TK[~top_TK].sum()

    def share(values) -> float:
        return float(values.mean()) if values.size else 0.0

    return Brought(
        low=share(~top_TK),
        top_absent=share(absent_TK[top_TK]),
        low_absent=share(absent_TK[~top_TK]),
        low_of_absent=float(low_absent / absent) if absent else 0.0,
    )
