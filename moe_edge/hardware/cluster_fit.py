"""A cluster's calibration from what its servers noted while they served.

What cannot be told apart is not: the head of a step counts as dense part of its layers;
in decoding, where every block has one pair, a block's own time is part of its pair's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cluster_calibration import (
    BucketCosts,
    ClusterCalibration,
    Messages,
    ServerCosts,
)

LEAST_S = 1e-9  # a cost that came out as nothing
_OUTLIER = 20.0  # median deviations, beyond which an observation is left out
_REFITS = 4


class AnswerSeen(NamedTuple):
    """A call that a server answered.

    Attributes:
      server: that computed.
      bucket: tokens of the caller's step, padding included.
      blocks, pairs: of the call.
      seconds: from the call's arrival in memory to its rows in memory.
    """

    server: int
    bucket: int
    blocks: int
    pairs: int
    seconds: float


class PassSeen(NamedTuple):
    """Tokens of a request that passed all layers together.

    Attributes:
      server, bucket: whose; tokens, padding included.
      seconds: from one token of the request to the next; of a prompt from its start.
      layers: with routed experts.
      split: of them, those of which other servers computed a part.
      waited_s: in these, from the first call sent to the last rows, in all.
      blocks, pairs: computed here in the other layers, in all.
    """

    server: int
    bucket: int
    seconds: float
    layers: int
    split: int
    waited_s: float
    blocks: int
    pairs: int


class WaitSeen(NamedTuple):
    """A layer of which other servers computed a part.

    Attributes:
      calls: how many servers.
      seconds: from the first call sent to the last rows.
      answered_s: of it, the computation of the call that came last.
      num_bytes: of that call, there and back.
    """

    calls: int
    seconds: float
    answered_s: float
    num_bytes: int


def fit_calibration(
    passes: Sequence[PassSeen],
    answers: Sequence[AnswerSeen],
    waits: Sequence[WaitSeen],
    *,
    load_s: Sequence[float],
    sizes: Messages,
    source: str,
) -> ClusterCalibration:
    """The costs that explain observations best, by least squares without outliers.

    A bucket that a server was not seen in costs what it costs the others.

    Args:
      load_s: of every server, seconds of a block into a slot.
      sizes: of messages, with the rate of the line; its seconds are replaced, and what
        software needs for each byte is added to the line's.
      source: how and on what it was measured.
    Raises:
      ConfigError: too little was seen: no token was decoded.
    """
    buckets = sorted({seen.bucket for seen in passes})
    if buckets[:1] != [1]:
        raise ConfigError(
            f"passes of buckets {buckets} were seen, expected some of 1 token: let "
            "requests decode a few tokens"
        )
    fitted = [
        [_bucket(server, bucket, passes, answers) for bucket in buckets]
        for server in range(len(load_s))
    ]
    servers = [
        ServerCosts(buckets=costs, load_s=max(seconds, LEAST_S))
        for costs, seconds in zip(fitted, load_s, strict=True)
    ]
    terms_WC = [(1.0, seen.calls, seen.num_bytes) for seen in waits]
    rest_W = [
        seen.seconds - seen.answered_s - seen.num_bytes / sizes.bytes_per_s
        for seen in waits
    ]
    terms_WC = np.array(terms_WC, np.float64).reshape(-1, 3)
    base_s, each_s, byte_s = least_squares(terms_WC, np.array(rest_W))
    given = vars(sizes) | {
        "base_s": base_s,
        "each_s": each_s,
        "bytes_per_s": 1 / (1 / sizes.bytes_per_s + byte_s),
    }
    return ClusterCalibration(
        servers=servers, messages=Messages(**given), source=source
    )


def _bucket(server: int, bucket: int, passes, answers) -> BucketCosts:
    """The costs of one bucket at one server."""
    call_s, block_s, pair_s = _answer_costs(server, bucket, answers)
    mine = _of(passes, server, bucket)
    terms_PC = np.array([(seen.layers, seen.split) for seen in mine], np.float64)
    rest_P = [
        seen.seconds - seen.waited_s - seen.blocks * block_s - seen.pairs * pair_s
        for seen in mine
    ]
    dense_s, split_s = least_squares(terms_PC, np.array(rest_P))
    return BucketCosts(
        tokens=bucket,
        dense_s=max(dense_s, LEAST_S),
        split_s=split_s,
        call_s=call_s,
        block_s=block_s,
        pair_s=max(pair_s, LEAST_S),
    )


def _answer_costs(server: int, bucket: int, answers) -> tuple[float, float, float]:
    """call_s, block_s and pair_s; those of decoding where nothing was asked."""
    mine = _of(answers, server, bucket) or _of(answers, server, 1)
    if not mine:
        return 0.0, 0.0, 0.0
    seconds_A = np.array([seen.seconds for seen in mine])
    if mine[0].bucket == 1:
        terms_AC = np.array([(1.0, seen.pairs) for seen in mine])
        call_s, pair_s = least_squares(terms_AC, seconds_A)
        return call_s, 0.0, pair_s
    terms_AC = np.array([(1.0, seen.blocks, seen.pairs) for seen in mine])
    call_s, block_s, pair_s = least_squares(terms_AC, seconds_A)
    return call_s, block_s, pair_s


def _of(seen: Sequence, server: int, bucket: int) -> list:
    """Observations of a server in a bucket; else of all servers in it."""
    alike = [one for one in seen if one.bucket == bucket]
    return [one for one in alike if one.server == server] or alike


def least_squares(terms_XC: np.ndarray, seconds_X: np.ndarray) -> list[float]:
    """Costs from 0 of every term; some times more without what lies far off.

    Terms that always stand in the same proportion share their cost arbitrarily.
    """
    count = terms_XC.shape[1]
    if not len(seconds_X):
        return [0.0] * count
    near_X = np.ones(len(seconds_X), bool)
    for _ in range(_REFITS):
        costs_C = _solve(terms_XC[near_X], seconds_X[near_X])
        off_X = np.abs(terms_XC @ costs_C - seconds_X)
        near_X = off_X <= _OUTLIER * max(float(np.median(off_X)), LEAST_S)
    return costs_C.tolist()


def _solve(terms_XC: np.ndarray, seconds_X: np.ndarray) -> np.ndarray:
    """Non-negative, with columns of one size, as seconds differ by powers of ten."""
    scale_C = np.maximum(np.abs(terms_XC).max(axis=0), LEAST_S)
    costs_C, _ = nnls(terms_XC / scale_C, seconds_X)
    return costs_C / scale_C
