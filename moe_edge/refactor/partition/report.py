"""How good a partition is: beside the baselines, on tokens that it was not made of."""

from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.refactor.partition.baselines import MAX_PARTITIONS, num_partitions
from moe_edge.refactor.partition.objective import (
    check_labels,
    grouped_sums,
    magnitudes,
    smallest,
    usage_of,
)
from moe_edge.refactor.partition.problem import check_matrix, check_split
from moe_edge.refactor.partition.solve import BASELINES, DEFAULT, solve

HELDOUT_RATIO = 0.2


def split_rows(
    tokens: int, heldout_ratio: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fit on and rows to hold out, ascending; at least one is fitted.

    Raises:
      ConfigError: a ratio outside 0..1.
    """
    if not 0 <= heldout_ratio < 1:
        raise ConfigError(f"heldout_ratio is {heldout_ratio}, expected 0 to below 1")
    order = np.random.default_rng(seed).permutation(tokens)
    count = min(int(tokens * heldout_ratio), tokens - 1)
    return np.sort(order[count:]), np.sort(order[:count])


def quality(M_TF, labels, subs: int, inactive: int) -> dict[str, Any]:
    """`qualities` of one partition."""
    return qualities(M_TF, {"": labels}, subs, inactive)[""]


def qualities(
    M_TF, partitions: dict[str, np.ndarray], subs: int, inactive: int
) -> dict[str, dict[str, Any]]:
    """Objective, its share of all |M|, and how the sub-experts are used.

    Args:
      partitions: name -> labels [F]; the norms of all come from one product.
    Returns:
      name -> objective, total (sum of |M|), share (0..1), usage (see `usage_of`) and
      usage_spread, its standard deviation: 0 is balanced use.
    """
    M_TF = magnitudes(M_TF)
    labels_RF = np.stack(
        [check_labels(labels, M_TF.shape[1], subs) for labels in partitions.values()]
    )
    norms_URT = grouped_sums(M_TF, labels_RF, subs)
    low_URT = smallest(norms_URT, inactive)
    total = float(norms_URT[:, 0].sum(dtype=np.float64))
    result = {}
    for r, name in enumerate(partitions):
        norms_UT, low_UT = norms_URT[:, r], low_URT[:, r]
        cost = float(norms_UT.sum(where=low_UT, dtype=np.float64))
        used_U = usage_of(norms_UT, low_UT)
        result[name] = {
            "objective": cost,
            "total": total,
            "share": cost / total if total > 0 else 0.0,
            "usage": [round(float(share), 6) for share in used_U],
            "usage_spread": float(used_U.std()),
        }
    return result


def heldout_report(
    M_TF,
    subs: int,
    inactive: int,
    *,
    solver: str = DEFAULT,
    seed: int = 0,
    heldout_ratio: float = HELDOUT_RATIO,
    token_weights_T=None,
    **options,
) -> dict[str, Any]:
    """Fits a solver and the baselines on some tokens, and scores them on the others.

    Every figure is the paper's objective, whatever was minimised. The optimum of the
    fitted tokens is added where brute force is possible.

    Args:
      M_TF: activations [T, F].
      heldout_ratio: share of the rows, drawn by `seed`, that is held out.
      **options: of `solve`, for the solver only.
    Returns:
      rows_fitted, rows_heldout, methods: name -> {fitted, heldout} of `quality`;
      heldout is None without rows.
    """
    M_TF = check_matrix(M_TF)
    check_split(M_TF.shape[1], subs, inactive)
    fit, held = split_rows(len(M_TF), heldout_ratio, seed)
    if token_weights_T is not None:
        options["token_weights_T"] = np.asarray(token_weights_T)[fit]
    fitted_TF, heldout_TF = magnitudes(M_TF[fit]), magnitudes(M_TF[held])
    names = [name for name in BASELINES if name != solver]
    if num_partitions(M_TF.shape[1], subs) <= MAX_PARTITIONS:
        names.append("brute_force")
    partitions = {
        solver: solve(fitted_TF, subs, inactive, solver=solver, seed=seed, **options)
    }
    for name in names:
        if name not in partitions:
            partitions[name] = solve(fitted_TF, subs, inactive, solver=name, seed=seed)
    labels = {name: found.labels for name, found in partitions.items()}
    fitted = qualities(fitted_TF, labels, subs, inactive)
    heldout = qualities(heldout_TF, labels, subs, inactive) if len(held) else {}
    return {
        "rows_fitted": len(fit),
        "rows_heldout": len(held),
        "methods": {
            name: {"fitted": fitted[name], "heldout": heldout.get(name)}
            for name in labels
        },
    }


def print_report(report: dict[str, Any]) -> None:
    """The report for people, as shares of all |M|."""
    print(f"{'share of |M| left out':24}{'fitted':>9}{'held out':>10}  use of subs")
    for name, both in report["methods"].items():
        held = both["heldout"]
        heldout = f"{100 * held['share']:8.2f} %" if held else f"{'-':>10}"
        used = " ".join(f"{share:.2f}" for share in both["fitted"]["usage"])
        print(f"{name:24}{100 * both['fitted']['share']:7.2f} %{heldout}  {used}")
