"""Goodput: the highest rate of requests of which enough are answered in time.

Whoever serves should take the same requests at every rate, their gaps stretched: what
differs between two rates is then the rate alone.
"""

import math
from collections.abc import Callable, Sequence

from moe_edge.core.checks import check_positive
from moe_edge.schedule.figures import summarise
from moe_edge.schedule.request import Request

TARGET = 0.9  # part of all offered requests that must be in time
STEPS = 10  # halvings: to a thousandth of the range between two powers of two
RANGE = 1e6  # around the first rate, in which is searched


def goodput(
    serve: Callable[[float], Sequence[Request]],
    *,
    first_rate: float = 1.0,
    slo_ttft_s: float = 0.5,
    slo_tpot_s: float = 0.02,
) -> float:
    """Requests a second; 0 or infinity if it is not within RANGE of `first_rate`.

    Args:
      serve: what becomes of all requests at a rate.
      first_rate: where the search begins.
      slo_ttft_s, slo_tpot_s: what in time means.
    """
    check_positive("first_rate", first_rate)
    limits = {"slo_ttft_s": slo_ttft_s, "slo_tpot_s": slo_tpot_s}

    def is_enough(rate: float) -> bool:
        return summarise(serve(rate), **limits)["slo_attainment"] >= TARGET

    rate = first_rate
    if is_enough(rate):
        while is_enough(2 * rate):
            rate *= 2
            if rate > first_rate * RANGE:
                return math.inf
    else:
        while not is_enough(rate / 2):
            rate /= 2
            if rate < first_rate / RANGE:
                return 0.0
        rate /= 2
    low, high = rate, 2 * rate
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    return low
