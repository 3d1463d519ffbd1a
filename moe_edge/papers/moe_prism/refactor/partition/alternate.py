"""Alternating minimisation with restarts: the default solver.

For fixed low sub-experts of every token the objective is linear in the assignment of
the neurons, `sum_f W[label(f), f]` with `W = low^T |M|`, so two steps alternate, each
of which cannot raise it: pick the low ones, reassign the neurons. Partitions are
treated side by side, which makes both steps matrix products of a good shape: 2 x 2 x
T x F x U operations a round and partition, at best at the machine's matmul rate.
"""

import contextlib
import dataclasses
import functools
import time

import numpy as np
from threadpoolctl import ThreadpoolController

from moe_edge.core.checks import check_count
from moe_edge.papers.moe_prism.refactor.partition.baselines import (
    MAX_PARTITIONS,
    brute_force,
    magnitude,
    num_partitions,
)
from moe_edge.papers.moe_prism.refactor.partition.objective import (
    grouped_sums,
    smallest,
)
from moe_edge.papers.moe_prism.refactor.partition.problem import Problem

FIRST, WIDE = 8, 32  # starts side by side, in the first batch and in later ones
KEPT = {FIRST: 1, WIDE: 4}  # of them go on from the sample to all tokens
SAMPLE_RATIO = {FIRST: 16, WIDE: 4}  # one token in so many is in the sample, ...
MIN_SAMPLE = 128  # ... but at least so many
EXHAUSTIVE = 2**25  # partitions x tokens that are all looked at
MAX_ROUNDS = 100  # a descent takes 3 to 40
# Relative: a descent ends when a round gains less. Sums are in float32; on a sample,
# whose best go on anyway, and in the first batch the last rounds cost more than they
# bring.
TOLERANCE, ROUGH = 1e-6, 3e-3


def alternate(
    problem: Problem, *, seed: int = 0, restarts: int = FIRST + WIDE
) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """Best of many descents.

    In batches: starts descend on a sample of the tokens, the best few of them then on
    all; a small first batch gives a good result soon. The first batch starts from
    random partitions and the magnitude sort; later ones are half random, half the best
    one so far with the neurons of two sub-experts remixed. Where looking at every
    partition takes no longer, that is done instead.

    Args:
      problem: what to minimise.
      seed: of the starts; the same seed gives the same labels.
      restarts: starts in all.
    Returns:
      labels int64 [F]; (seconds so far, problem's objective) after each batch, and
      after a last descent of the best.
    Source: own; MoE-Prism (section 4.2.2) anneals, see anneal.py.
    """
    check_count("restarts", restarts)
    count = num_partitions(problem.neurons, problem.subs)
    if count * len(problem.A_TF) <= EXHAUSTIVE and count <= MAX_PARTITIONS:
        started = time.perf_counter()
        best_F = brute_force(problem)
        cost = problem.cost(best_F) / problem.unit
        return best_F, [(time.perf_counter() - started, cost)]
    return search(problem, seed, restarts)


# Looks through the loaded libraries once: milliseconds.
_libraries = functools.cache(ThreadpoolController)


def one_blas_thread() -> contextlib.AbstractContextManager:
    """Keeps NumPy's matrix products on their caller's thread inside the block.

    Experts are solved in parallel, and machines are shared: products that each want all
    cores then wait for one another (measured under load: 0.1 s an expert becomes 0.7).
    """
    return _libraries().limit(limits=1, user_api="blas")


def search(
    problem: Problem, seed: int, restarts: int
) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """The descents of `alternate`."""
    started, rng = time.perf_counter(), np.random.default_rng(seed)
    best_F, best_cost, history = None, np.inf, []
    with one_blas_thread():
        for R in batch_sizes(restarts):
            starts_RF = random_partitions(rng, R, problem.neurons, problem.subs)
            if best_F is not None:
                for row_F in starts_RF[1::2]:
                    row_F[:] = remix(rng, best_F, problem.subs)
            elif R > 1:
                starts_RF[-1] = magnitude(problem)
            size = FIRST if R <= FIRST else WIDE
            kept = KEPT[size]
            if R > kept:
                sample = sampled(problem, rng, SAMPLE_RATIO[size])
                cost_R, starts_RF = descend(sample, starts_RF, tolerance=ROUGH)
                starts_RF = starts_RF[np.argsort(cost_R, kind="stable")[:kept]]
            tolerance = ROUGH if best_F is None else TOLERANCE
            cost_R, labels_RF = descend(problem, starts_RF, tolerance=tolerance)
            if cost_R.min() < best_cost:
                best_cost, best_F = cost_R.min(), labels_RF[cost_R.argmin()]
            history.append((time.perf_counter() - started, float(best_cost)))
        # The best may be of the first batch, which soon was content.
        (best_cost,), (best_F,) = descend(problem, best_F[None])
        history.append((time.perf_counter() - started, float(best_cost)))
    return best_F, history


def batch_sizes(restarts: int) -> list[int]:
    """Starts of each batch: FIRST, then WIDE each, the last one with what is left."""
    sizes = [min(FIRST, restarts)]
    while (left := restarts - sum(sizes)) > 0:
        sizes.append(min(WIDE, left))
    return sizes


def sampled(problem: Problem, rng, ratio: int) -> Problem:
    """The problem on one in `ratio` of its tokens; itself where they are few."""
    tokens = len(problem.A_TF)
    count = max(tokens // ratio, MIN_SAMPLE)
    if count >= tokens:
        return problem
    rows = np.sort(rng.choice(tokens, count, replace=False))
    return dataclasses.replace(problem, A_TF=problem.A_TF[rows])


def descend(
    problem: Problem,
    labels_RF: np.ndarray,
    max_rounds: int = MAX_ROUNDS,
    tolerance: float = TOLERANCE,
) -> tuple[np.ndarray, np.ndarray]:
    """Descends from each partition until its objective stands still.

    Returns:
      objective [R] and labels int64 [R, F]; none is above its start.
    """
    best_RF, best_R = labels_RF.copy(), np.full(len(labels_RF), np.inf)
    live = np.arange(len(labels_RF))
    for _ in range(max_rounds):
        norms_URT = grouped_sums(problem.A_TF, labels_RF, problem.subs)
        low_URT = smallest(norms_URT, problem.inactive).astype(np.float32)
        cost_R = np.einsum("urt,urt->r", low_URT, norms_URT, dtype=np.float64)
        lower = cost_R < best_R[live]
        better = cost_R < best_R[live] * (1 - tolerance)
        best_R[live[lower]] = cost_R[lower]
        best_RF[live[lower]] = labels_RF[lower]
        if not better.any():
            break
        live, labels_RF = live[better], labels_RF[better]
        scores_URF = low_URT[:, better] @ problem.A_TF
        labels_RF = reassign(scores_URF, labels_RF)
    return best_R, best_RF


def reassign(scores_URF: np.ndarray, labels_RF: np.ndarray) -> np.ndarray:
    """Lowers `sum_f scores[label(f), f]` of balanced labels by pairwise exchange.

    Two sub-experts share their neurons out by the difference of scores, which is
    optimal for the two; every pair has its turn once, disjoint pairs together.

    Args:
      scores_URF: cost of each neuron in each sub-expert, for R partitions.
      labels_RF: the labels to start from.
    Returns:
      int64 [R, F].
    """
    U, (R, F) = len(scores_URF), labels_RF.shape
    size = F // U
    members_RUS = np.argsort(labels_RF, axis=1, kind="stable").reshape(R, U, size)
    rows = np.arange(R)[:, None, None]
    for a, b in disjoint_pairs(U):
        both = np.concatenate([members_RUS[:, a], members_RUS[:, b]], axis=2)
        gain = scores_URF[a[:, None], rows, both] - scores_URF[b[:, None], rows, both]
        order = np.argpartition(gain, size - 1, axis=2)
        both = np.take_along_axis(both, order, axis=2)
        members_RUS[:, a], members_RUS[:, b] = both[..., :size], both[..., size:]
    result_RF = np.empty_like(labels_RF)
    subs_RF = np.broadcast_to(np.repeat(np.arange(U), size), (R, F))
    np.put_along_axis(result_RF, members_RUS.reshape(R, F), subs_RF, axis=1)
    return result_RF


def disjoint_pairs(subs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """All pairs, as a round-robin tournament: each round's pairs share nobody."""
    places = list(range(subs + subs % 2))  # with a bye if odd
    half, rounds = len(places) // 2, []
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], places[::-1][:half], strict=True)
        pairs = [pair for pair in pairs if max(pair) < subs]
        rounds.append(
            (np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]))
        )
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def random_partitions(rng, R: int, neurons: int, subs: int) -> np.ndarray:
    """int64 [R, F], each row balanced."""
    labels_RF = np.tile(np.arange(neurons) % subs, (R, 1))
    return rng.permuted(labels_RF, axis=1)


def remix(rng, labels_F: np.ndarray, subs: int) -> np.ndarray:
    """`labels_F` with the neurons of two sub-experts shared out again at random."""
    chosen = np.flatnonzero(np.isin(labels_F, rng.choice(subs, 2, replace=False)))
    mixed_F = labels_F.copy()
    mixed_F[chosen] = rng.permutation(labels_F[chosen])
    return mixed_F
