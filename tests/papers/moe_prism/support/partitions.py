"""Reference figures of partitions, written plainly."""

import numpy as np

from moe_edge.papers.moe_prism.refactor.partition import solve
from moe_edge.papers.moe_prism.refactor.partition.objective import (
    grouped_sums,
    magnitudes,
    smallest,
    usage_of,
)
from moe_edge.papers.moe_prism.refactor.partition.problem import build_problem


def slow_objective(M_TF, labels, subs, inactive):
    """Token by token, as the paper writes it."""
    cost = 0.0
    for row_F in np.abs(np.asarray(M_TF, np.float64)):
        norms = sorted(row_F[labels == sub].sum() for sub in range(subs))
        cost += sum(norms[:inactive])
    return cost


def usage(M_TF, labels, subs, inactive):
    """`usage_of` a partition of these activations, float64 [U]."""
    norms_UT = grouped_sums(magnitudes(M_TF), labels, subs)
    return usage_of(norms_UT, smallest(norms_UT, inactive))


def solved(M_TF, subs, inactive, solver=solve.DEFAULT, seed=0, weights=None, **options):
    """Ordered labels of a solver; `weights` are options of `build_problem`."""
    problem = build_problem(M_TF, subs, inactive, **weights or {})
    return problem.ordered(solve.solve(problem, solver, seed, **options))
