"""Choice of SMoE's a: the least substitution that meets a budget of time per token.

Source: SMoE, section V.C, eq. 5: fit TPOT(a) with a low-degree polynomial to measured
points; accuracy falls with a, so take the smallest a whose predicted TPOT meets the
budget. Points are of one model on one machine and serve no other.
"""

import dataclasses

import numpy as np
from numpy.polynomial import Polynomial

from moe_edge.core.checks import CapacityError, ConfigError, check_count, check_positive

ROUNDING = 1e-9  # of roots


@dataclasses.dataclass(frozen=True)
class ChoiceOfA:
    """A chosen a and what supports it."""

    a: float  # the smallest whose predicted TPOT meets the budget
    predicted_tpot_s: float  # the fit's value there, seconds per token
    budget_tpot_s: float  # what was asked for
    coefficients: tuple[float, ...]  # of the polynomial in a, constant first
    max_residual_s: float  # largest |fit - measured| over the points

    @property
    def is_certain(self) -> bool:
        """Whether the budget holds even if the fit is off by its worst residual."""
        return self.predicted_tpot_s + self.max_residual_s <= self.budget_tpot_s


def choose_a(
    a_N: np.ndarray, tpot_s_N: np.ndarray, budget_tpot_s: float, *, degree: int = 2
) -> ChoiceOfA:
    """Fits TPOT(a) and picks the smallest a within the budget (R of eq. 5).

    Args:
      a_N: measured values of a, within [0, 1); repetitions are welcome.
      tpot_s_N: their seconds per token.
    Raises:
      ConfigError: points that do not fit together, are not finite or out of range, or
        fewer distinct a than degree + 2, which would leave no residual to judge by.
      CapacityError: no measured a meets the budget; says the best that can be had.
    """
    a_N, tpot_s_N = _check_points(a_N, tpot_s_N, degree)
    check_positive("budget_tpot_s", budget_tpot_s)
    low, high = float(a_N.min()), float(a_N.max())
    fit = Polynomial.fit(a_N, tpot_s_N, degree)
    # A vanishing leading coefficient would make the roots inaccurate.
    fit = fit.trim(ROUNDING * np.abs(fit.coef).max())
    if fit(low) <= budget_tpot_s:
        a = low
    else:
        # Above the budget at `low`, the fit first meets it at its first crossing.
        crossings = _real_between((fit - budget_tpot_s).trim().roots(), low, high)
        if not len(crossings):
            turns = _real_between(fit.deriv().trim().roots(), low, high)
            reachable = np.concatenate([[low, high], turns])
            best = reachable[np.argmin(fit(reachable))]
            raise CapacityError(
                f"no a in [{low:g}, {high:g}] meets {budget_tpot_s:g} s per token; the "
                f"best is {fit(best):g} s at a = {best:g}: raise the budget or the "
                "device memory"
            )
        a = float(crossings.min())
    return ChoiceOfA(
        a=a,
        predicted_tpot_s=float(fit(a)),
        budget_tpot_s=float(budget_tpot_s),
        coefficients=tuple(fit.convert().coef.tolist()),
        max_residual_s=float(np.abs(fit(a_N) - tpot_s_N).max()),
    )


def _check_points(a_N, tpot_s_N, degree: int) -> tuple[np.ndarray, np.ndarray]:
    check_count("degree of the fit", degree)
    a_N, tpot_s_N = np.asarray(a_N, np.float64), np.asarray(tpot_s_N, np.float64)
    if a_N.ndim != 1 or a_N.shape != tpot_s_N.shape:
        raise ConfigError(
            f"a has shape {a_N.shape} and TPOT {tpot_s_N.shape}, expected one TPOT for "
            "each a"
        )
    is_bad_N = ~((a_N >= 0) & (a_N < 1) & np.isfinite(tpot_s_N) & (tpot_s_N > 0))
    if is_bad_N.any():
        at = int(np.argmax(is_bad_N))
        raise ConfigError(
            f"measured point {at} is a = {a_N[at]:g} with {tpot_s_N[at]:g} s a token, "
            "expected a in [0, 1) and a finite time above 0; measure it again"
        )
    distinct = len(np.unique(a_N))
    if distinct < degree + 2:
        raise ConfigError(
            f"{distinct} distinct a are too few for a fit of degree {degree}, expected "
            f"at least {degree + 2}; measure more or lower the degree"
        )
    return a_N, tpot_s_N


def _real_between(roots: np.ndarray, low: float, high: float) -> np.ndarray:
    """The real ones among `roots` within [low, high], up to rounding."""
    real = roots.real[np.abs(roots.imag) < ROUNDING]
    inside = real[(real >= low - ROUNDING) & (real <= high + ROUNDING)]
    return np.clip(inside, low, high)
