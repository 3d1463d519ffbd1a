"""A cluster's calibration from what its servers noted while they served.

Servers slow each other down, so every observation says how many of them had requests
(`busy`), and costs are found together with the slowdown at each such number.

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
_ROUNDS = 3  # of costs and slowdowns in turns; further ones change less than 1 %


class AnswerSeen(NamedTuple):
    """A call that a server answered.

    Attributes:
      server: that computed.
      bucket: tokens of the caller's step, padding included.
      blocks, pairs: of the call.
      seconds: from the call's arrival in memory to its rows in memory.
      busy: servers that had requests.
    """

    server: int
    bucket: int
    blocks: int
    pairs: int
    seconds: float
    busy: int


class PassSeen(NamedTuple):
    """Tokens of a request that passed all layers together.

    Attributes:
      server, bucket: whose; tokens, padding included.
      seconds: from one token of the request to the next, of a prompt from its start,
        less all times from a layer's first call sent to its last rows.
      layers: with routed experts.
      split: of them, those of which other servers computed a part.
      blocks, pairs: computed here in the other layers, in all.
      busy: servers that had requests.
    """

    server: int
    bucket: int
    seconds: float
    layers: int
    split: int
    blocks: int
    pairs: int
    busy: int


class WaitSeen(NamedTuple):
    """A layer of which other servers computed a part.

    Attributes:
      calls: how many servers.
      seconds: from the first call sent to the last rows, less the computation of the
        call that came last.
      num_bytes: of that call, there and back.
      busy: servers that had requests.
    """

    calls: int
    seconds: float
    num_bytes: int
    busy: int


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
    most = max(seen.busy for seen in passes)
    waits = [
        seen._replace(seconds=seen.seconds - seen.num_bytes / sizes.bytes_per_s)
        for seen in waits
    ]
    compute_K = message_K = np.ones(most)
    for _ in range(_ROUNDS):
        servers = _servers(
            _alone(passes, compute_K), _alone(answers, compute_K), load_s
        )
        base_s, each_s, byte_s = _messages(_alone(waits, message_K))
        at = {(n, b.tokens): b for n, one in enumerate(servers) for b in one.buckets}
        computed_s = [_pass_s(at[seen.server, seen.bucket], seen) for seen in passes]
        computed_s += [
            _answer_s(at[seen.server, seen.bucket], seen) for seen in answers
        ]
        compute_K = _slowdown([*passes, *answers], computed_s, most)
        left = [s._replace(seconds=s.seconds - s.num_bytes * byte_s) for s in waits]
        sent_s = [base_s + each_s * seen.calls for seen in waits]
        message_K = _slowdown(left, sent_s, most)
    given = vars(sizes) | {
        "base_s": base_s,
        "each_s": each_s,
        "bytes_per_s": 1 / (1 / sizes.bytes_per_s + byte_s),
    }
    return ClusterCalibration(
        servers=servers,
        messages=Messages(**given),
        source=source,
        compute_slowdown=compute_K.tolist(),
        message_slowdown=message_K.tolist(),
    )


def _alone(seen: Sequence, times_K: np.ndarray) -> list:
    """Observations as they would be if one server had requests."""
    times = (times_K / times_K[0]).tolist()
    return [one._replace(seconds=one.seconds / times[one.busy - 1]) for one in seen]


def _slowdown(seen: Sequence, costs_s: Sequence[float], most: int) -> np.ndarray:
    """float64 [most]: what was seen over what it costs, by servers that had requests.

    The first is above 1 where costs were found without what lies far off. A number of
    servers that was not seen lies between its neighbours.
    """
    busy_X = np.array([one.busy - 1 for one in seen], int)
    seconds_X = np.array([one.seconds for one in seen], np.float64)
    real_K = np.bincount(busy_X, seconds_X, most)
    cost_K = np.bincount(busy_X, np.array(costs_s, np.float64), most)
    known = np.flatnonzero((cost_K > 0) & (real_K > 0))
    if not len(known):
        return np.ones(most)
    return np.interp(np.arange(most), known, real_K[known] / cost_K[known])


def _pass_s(costs: BucketCosts, seen: PassSeen) -> float:
    """What a pass takes by itself, one server having requests."""
    own_s = seen.blocks * costs.block_s + seen.pairs * costs.pair_s
    return seen.layers * costs.dense_s + seen.split * costs.split_s + own_s


def _answer_s(costs: BucketCosts, seen: AnswerSeen) -> float:
    """What a call takes its server, likewise."""
    return costs.call_s + seen.blocks * costs.block_s + seen.pairs * costs.pair_s


def _servers(passes, answers, load_s: Sequence[float]) -> list[ServerCosts]:
    """The costs of every server in every bucket that was seen."""
    buckets = sorted({seen.bucket for seen in passes})
    return [
        ServerCosts(
            buckets=[_bucket(server, bucket, passes, answers) for bucket in buckets],
            load_s=max(seconds, LEAST_S),
        )
        for server, seconds in enumerate(load_s)
    ]


def _messages(waits: Sequence[WaitSeen]) -> list[float]:
    """base_s, each_s, and seconds a byte that software needs."""
    terms_WC = [(1.0, seen.calls, seen.num_bytes) for seen in waits]
    seconds_W = np.array([seen.seconds for seen in waits])
    return least_squares(np.array(terms_WC, np.float64).reshape(-1, 3), seconds_W)


def _bucket(server: int, bucket: int, passes, answers) -> BucketCosts:
    """The costs of one bucket at one server."""
    call_s, block_s, pair_s = _answer_costs(server, bucket, answers)
    mine = _of(passes, server, bucket)
    terms_PC = np.array([(seen.layers, seen.split) for seen in mine], np.float64)
    rest_P = [
        seen.seconds - seen.blocks * block_s - seen.pairs * pair_s for seen in mine
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
