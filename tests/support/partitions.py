"""Reference figures of partitions, written plainly."""

import numpy as np

from moe_edge.refactor.partition.objective import smallest, subset_norms, usage_of


def slow_objective(M_TF, labels, subs, inactive):
    """Token by token, as the paper writes it."""
    cost = 0.0
    for row_F in np.abs(np.asarray(M_TF, np.float64)):
        norms = sorted(row_F[labels == sub].sum() for sub in range(subs))
        cost += sum(norms[:inactive])
    return cost


def usage(M_TF, labels, subs, inactive):
    """`usage_of` a partition of these activations, float64 [U]."""
    norms_UT = subset_norms(M_TF, labels, subs)
    return usage_of(norms_UT, smallest(norms_UT, inactive))
