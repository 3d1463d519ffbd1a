"""Simulated annealing as in the paper: the reference that others are measured against.

A step swaps two neurons of two sub-experts; its cost is incremental: only two norms of
every token change. `anneal` runs all steps in one jitted loop, `anneal_numpy` step by
step; both take the same proposals, so they walk the same path up to rounding.

The schedule is the paper's: T0 = 100, x 0.995 a step, 100,000 steps. It is cold after
some 3,000 steps, hill climbing from then on, and T0 only means something in
relation to the cost: `cost_scale` multiplies the objective (of the activations as
given, not of `Problem.A_TF`).

A jitted step takes 5 to 6 us (1024 neurons, 2048 tokens, U = 4), one compiled by numba
was measured at 8.5 us on the same machine, so there is no numba variant.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import check_count, check_positive
from moe_edge.papers.moe_prism.refactor.partition.baselines import greedy
from moe_edge.papers.moe_prism.refactor.partition.objective import grouped_sums
from moe_edge.papers.moe_prism.refactor.partition.problem import Problem

T0 = 100.0
COOLING = 0.995
STEPS = 100_000


class Proposals(NamedTuple):
    """What the steps will try."""

    subs_S2: np.ndarray  # int32 [steps, 2], two different sub-experts
    places_S2: np.ndarray  # int32 [steps, 2], which of its neurons each gives
    limit_S: np.ndarray  # float32, the rise that is still accepted: -T log(u)


def draw_proposals(
    problem: Problem,
    *,
    seed: int = 0,
    steps: int = STEPS,
    t0: float = T0,
    cooling: float = COOLING,
    cost_scale: float = 1.0,
) -> Proposals:
    """Proposals in the units of `problem.A_TF`.

    Args:
      seed: of everything random.
      steps, t0, cooling: the schedule; the defaults are the paper's.
      cost_scale: factor of the cost before it meets the temperature.
    """
    check_count("steps", steps)
    for name, value in (("t0", t0), ("cooling", cooling), ("cost_scale", cost_scale)):
        check_positive(name, value)
    rng = np.random.default_rng(seed)
    U, size = problem.subs, problem.neurons // problem.subs
    first_S = rng.integers(0, U, steps, dtype=np.int32)
    second_S = (first_S + rng.integers(1, U, steps, dtype=np.int32)) % np.int32(U)
    places_S2 = rng.integers(0, size, (steps, 2), dtype=np.int32)
    # Accepted if u < exp(-rise / T); u is never 0, so that limits stay finite.
    temperature_S = t0 * cooling ** np.arange(steps, dtype=np.float64)
    scale = cost_scale * problem.unit
    limit_S = -temperature_S * np.log(1 - rng.random(steps)) / scale
    return Proposals(
        np.stack([first_S, second_S], axis=1), places_S2, limit_S.astype(np.float32)
    )


def anneal(problem: Problem, **schedule) -> np.ndarray:
    """Anneals from the greedy start in one jitted loop; best labels met, int64 [F].

    Args:
      problem: what to minimise.
      **schedule: of `draw_proposals`.
    Source: MoE-Prism, section 4.2.2; schedule of the authors' settings.
    """
    proposals = draw_proposals(problem, **schedule)
    start = map(jnp.asarray, (*_start(problem), *proposals))
    return _labels(np.asarray(_anneal(*start, inactive=problem.inactive)))


def anneal_numpy(problem: Problem, **schedule) -> np.ndarray:
    """`anneal` in NumPy, a Python step at a time; int64 [F].

    As lean as NumPy allows: a step computes the two rows that change and whole-row
    minima and maxima, no copy of the others and no sort where U is 4 or less.
    """
    proposals = draw_proposals(problem, **schedule)
    A_FT, members_US, norms_UT = _start(problem)
    cost = float(_lowest(*norms_UT[:2], norms_UT[2:], problem.inactive).sum())
    lowest, best_US = cost, members_US.copy()
    others = _others(problem.subs)
    steps = zip(*(array.tolist() for array in proposals), strict=True)
    for (p, q), (i, j), limit in steps:
        moved_T = A_FT[members_US[q, j]] - A_FT[members_US[p, i]]
        p_T, q_T = norms_UT[p] + moved_T, norms_UT[q] - moved_T
        rest = [norms_UT[u] for u in others[p][q]]
        trial = float(_lowest(p_T, q_T, rest, problem.inactive).sum())
        if trial - cost <= limit:
            members_US[p, i], members_US[q, j] = members_US[q, j], members_US[p, i]
            norms_UT[p], norms_UT[q], cost = p_T, q_T, trial
            if cost < lowest:
                lowest, best_US = cost, members_US.copy()
    return _labels(best_US)


def _others(subs: int) -> list[list[list[int]]]:
    """[p][q]: the sub-experts other than p and q."""
    return [
        [[u for u in range(subs) if u not in (p, q)] for q in range(subs)]
        for p in range(subs)
    ]


def _lowest(p_T, q_T, rest, inactive: int) -> np.ndarray:
    """What the inactive ones sum to, token by token, up to a constant of the token.

    A swap leaves p + q as it is, so the sum of all rows is such a constant, and leaving
    out one sub-expert less than all is to lower the largest row's share.
    """
    if inactive == len(rest) + 1:
        return -functools.reduce(np.maximum, rest, np.maximum(p_T, q_T))
    if inactive == 1:
        return functools.reduce(np.minimum, rest, np.minimum(p_T, q_T))
    if inactive == len(rest) == 2:
        # The two lowest of two pairs are a pair, or the lower one of each.
        a_T, b_T = rest
        crossed_T = np.minimum(p_T, q_T) + np.minimum(a_T, b_T)
        return np.minimum(crossed_T, np.minimum(p_T + q_T, a_T + b_T))
    rows_UT = np.stack([p_T, q_T, *rest])
    return np.partition(rows_UT, inactive - 1, axis=0)[:inactive].sum(0)


def _start(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Neurons as rows, members [U, F / U] of the greedy start, and its norms [U, T]."""
    labels_F = greedy(problem)
    members_US = np.argsort(labels_F, kind="stable").reshape(problem.subs, -1)
    norms_UT = grouped_sums(problem.A_TF, labels_F, problem.subs)
    A_FT = np.ascontiguousarray(problem.A_TF.T)
    return A_FT, members_US.astype(np.int32), norms_UT


def _labels(members_US: np.ndarray) -> np.ndarray:
    labels_F = np.empty(members_US.size, np.int64)
    labels_F[members_US] = np.arange(len(members_US))[:, None]
    return labels_F


@functools.partial(jax.jit, static_argnames="inactive")
def _anneal(
    A_FT, members_US, norms_UT, subs_S2, places_S2, limit_S, *, inactive: int
) -> jax.Array:
    """Members of the best partition met."""

    def step(s, state):
        members_US, norms_UT, cost_T, change, lowest, best_US = state
        (p, q), (i, j) = subs_S2[s], places_S2[s]
        a, b = members_US[p, i], members_US[q, j]
        moved_T = A_FT[b] - A_FT[a]
        p_T, q_T = norms_UT[p] + moved_T, norms_UT[q] - moved_T
        U = len(norms_UT)
        rows = [
            jnp.where(u == p, p_T, jnp.where(u == q, q_T, norms_UT[u]))
            for u in range(U)
        ]
        trial_T = smallest_sum(rows, inactive)
        rise = (trial_T - cost_T).sum()
        accept = rise <= limit_S[s]
        members_US = members_US.at[p, i].set(jnp.where(accept, b, a))
        members_US = members_US.at[q, j].set(jnp.where(accept, a, b))
        norms_UT = norms_UT.at[p].set(jnp.where(accept, p_T, norms_UT[p]))
        norms_UT = norms_UT.at[q].set(jnp.where(accept, q_T, norms_UT[q]))
        cost_T = jnp.where(accept, trial_T, cost_T)
        change = change + jnp.where(accept, rise, 0)
        best_US = jnp.where(change < lowest, members_US, best_US)
        lowest = jnp.minimum(change, lowest)
        return members_US, norms_UT, cost_T, change, lowest, best_US

    cost_T = smallest_sum(list(norms_UT), inactive)
    zero = jnp.zeros((), norms_UT.dtype)
    state = (members_US, norms_UT, cost_T, zero, zero, members_US)
    return jax.lax.fori_loop(0, len(limit_S), step, state)[-1]


def smallest_sum(rows: list[jax.Array], count: int) -> jax.Array:
    """Sum of the `count` smallest of the rows, element by element.

    Bubbles out the fewer ones, small or large: a sort along the axis is several times
    slower on a CPU.
    """
    rows, total, from_top = list(rows), sum(rows), count > len(rows) // 2
    first, second = (
        (jnp.maximum, jnp.minimum) if from_top else (jnp.minimum, jnp.maximum)
    )
    picked = 0
    for _ in range(len(rows) - count if from_top else count):
        chosen = rows[0]
        for n in range(1, len(rows)):
            chosen, rows[n] = first(chosen, rows[n]), second(chosen, rows[n])
        rows, picked = rows[1:], picked + chosen
    return total - picked if from_top else picked
