"""Whether values that were measured twice are as near as their bounds let them be."""

import math
from typing import NamedTuple

from scipy.special import bdtr, ndtri, stdtrit

SURE = 0.95  # of intervals, and that a true repetition is taken for one
MANY = 1000  # observations; more or less make no difference
FEW = 30  # observations, which are starts, rounds or seeds; of more it is not known


class Value(NamedTuple):
    """A value and its bounds, which are NaN if it has none, of `n` observations, in a
    unit, where it is known."""

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = MANY
    unit: str | None = None

    def __str__(self) -> str:
        bounds = "" if math.isnan(self.low) else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.value:.4g}{bounds}"


def difference_allowed(low: Value, high: Value) -> float:
    """By how much a value may lie above another one; NaN without bounds.

    Student's t times the standard error of the difference, by the widths that face each
    other. Few observations of both are taken to vary alike, so their variances are
    pooled (the two-sample t test): two of one side say little of their own. 95 % of
    true repetitions lie within, for 2 to 7 starts on either side (simulated, normal);
    bounds as they are let 83 % through with 3 and 3, and 70 % with 7 and 2.
    """
    counts = low.n, high.n
    if min(counts) < 2:
        return math.nan  # one observation has no bounds
    errors = (
        standard_error(low.high - low.value, low.n),
        standard_error(high.value - high.low, high.n),
    )
    freedom = sum(counts) - 2
    t = float(stdtrit(freedom, (1 + SURE) / 2))
    if max(counts) > FEW:
        return t * math.hypot(*errors)
    pairs = zip(counts, errors, strict=True)
    variance = sum((n - 1) * n * error**2 for n, error in pairs) / freedom
    return t * math.sqrt(variance * sum(1 / n for n in counts))


def standard_error(width: float, n: int) -> float:
    """Of a mean of `n` observations, by the width of its 95 % bounds on one side, which
    a bootstrap makes too narrow by root((n - 1) / n). Of two observations it gives
    these, whose distance from their mean is the error."""
    if n == 2:
        return width
    return width / float(ndtri((1 + SURE) / 2)) / math.sqrt((n - 1) / n)


def most_outside(count: int) -> int:
    """Of so many values with bounds, how many chance leaves outside, if they do not
    depend on each other: more happen in 5 % of true repetitions."""
    return next(k for k in range(count + 1) if bdtr(k, count, 1 - SURE) >= SURE)
