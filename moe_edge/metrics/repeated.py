"""Whether values that were measured twice are as near as their bounds let them be."""

import math
from typing import NamedTuple

from scipy.special import bdtr, ndtri, stdtrit

SURE = 0.95  # of intervals, and that a true repetition is taken for one
MANY = 1000  # observations; more or less make no difference


class Value(NamedTuple):
    """A value and its bounds, which are NaN if it has none, of `n` observations."""

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = MANY

    def __str__(self) -> str:
        bounds = "" if math.isnan(self.low) else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.value:.4g}{bounds}"


def difference_allowed(low: Value, high: Value) -> float:
    """By how much a value may lie above another one: the root of the sum of the squared
    widths that face each other, each times its `widening`; NaN without bounds."""
    return math.hypot(
        (low.high - low.value) * widening(low.n, high.n),
        (high.value - high.low) * widening(high.n, low.n),
    )


def widening(n: int, others: int) -> float:
    """What the bounds of `n` observations, compared with those of `others`, are to be
    multiplied by: a bootstrap over few is too narrow by root((n - 1) / n), and takes
    what they vary by for known (Student's t in place of the normal distribution).

    With 3 starts and 3, bounds as they are let 83 % of true repetitions through, and
    95 % so (simulated, normal). Ranges of 5 rounds would not need it.
    """
    if n < 2 or others < 2:
        return math.nan  # one observation has no bounds
    t = stdtrit(n + others - 2, (1 + SURE) / 2) / ndtri((1 + SURE) / 2)
    return float(t) * math.sqrt(n / (n - 1))


def most_outside(count: int) -> int:
    """Of so many values with bounds, how many chance leaves outside, if they do not
    depend on each other: more happen in 5 % of true repetitions."""
    return next(k for k in range(count + 1) if bdtr(k, count, 1 - SURE) >= SURE)
