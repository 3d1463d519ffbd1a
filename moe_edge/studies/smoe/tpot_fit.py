"""Eq. 5 of SMoE on measured points: the fit of TPOT over a, in words and rows."""

from typing import Any

import numpy as np

from moe_edge.core.checks import CapacityError
from moe_edge.metrics.results import metric
from moe_edge.offload.choose_a import choose_a


def fit_of(batch: int, a_N, tpot_s_N, budget_tpot_s: float | None, degree: int):
    """Eq. 5 on measured points: the choice as a dict; `a` None if none meets it.

    Args:
      batch: kept in the result.
      a_N, tpot_s_N: one point a round.
      budget_tpot_s: None: halfway between the slowest and the fastest a.
      degree: of the polynomial.
    """
    a_N, tpot_s_N = np.asarray(a_N), np.asarray(tpot_s_N)
    median_s = {a: float(np.median(tpot_s_N[a_N == a])) for a in np.unique(a_N)}
    slowest_s, fastest_s = max(median_s.values()), min(median_s.values())
    budget_s = budget_tpot_s or (slowest_s + fastest_s) / 2
    line = np.polynomial.Polynomial.fit(a_N, tpot_s_N, 1)
    spread = float(np.var(tpot_s_N))
    found = {
        "batch": batch,
        "budget_tpot_s": budget_s,
        "tpot_s": median_s,
        "linear_r2": 1 - float(np.mean((line(a_N) - tpot_s_N) ** 2)) / spread
        if spread
        else 1.0,
    }
    try:
        choice = choose_a(a_N, tpot_s_N, budget_s, degree=degree)
    except CapacityError as error:
        fit = np.polynomial.Polynomial.fit(a_N, tpot_s_N, degree)
        none = {"a": None, "predicted_tpot_s": None, "is_certain": False}
        left = {"coefficients": fit.convert().coef.tolist(), "reason": str(error)}
        return found | none | left
    return found | {
        "a": choice.a,
        "predicted_tpot_s": choice.predicted_tpot_s,
        "coefficients": list(choice.coefficients),
        "max_residual_s": choice.max_residual_s,
        "is_certain": choice.is_certain,
    }


def falls(fit: dict[str, Any]) -> bool:
    """Whether the largest a is faster than the smallest."""
    times_s = list(fit["tpot_s"].values())  # by a, ascending
    return times_s[-1] < times_s[0]


def sentence(fit: dict[str, Any]) -> str:
    """The fit of a batch size in words."""
    (low, first_s), (high, last_s) = list(fit["tpot_s"].items())[
        :: len(fit["tpot_s"]) - 1
    ]
    text = (
        f"Batch {fit['batch']}: {1e3 * first_s:.1f} ms at a={low:g}, "
        f"{1e3 * last_s:.1f} ms at a={high:g} "
        f"({100 * (last_s / first_s - 1):+.0f} %); for "
        f"{1e3 * fit['budget_tpot_s']:.1f} ms "
    )
    if fit["a"] is None:
        return text + "no measured a is enough"
    certain = "" if fit["is_certain"] else ", within the fit's error"
    return text + f"the least a is {fit['a']:.2f}{certain}"


def fit_rows(fit: dict[str, Any]) -> list[dict]:
    """The metrics of a fit."""
    what = f"choice of a, batch {fit['batch']}"
    rows = [metric(what, "TPOT budget", 1e3 * fit["budget_tpot_s"], "ms")]
    if fit["a"] is not None:
        rows.append(metric(what, "chosen a", fit["a"], "1"))
        rows.append(metric(what, "predicted TPOT", 1e3 * fit["predicted_tpot_s"], "ms"))
        rows.append(metric(what, "largest residual", 1e3 * fit["max_residual_s"], "ms"))
    return [*rows, metric(what, "r2 of a straight line", fit["linear_r2"], "1")]
