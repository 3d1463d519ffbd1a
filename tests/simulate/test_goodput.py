"""Goodput by hand: a server that is in time up to a known rate."""

import math

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.schedule.request import Request
from moe_edge.simulate.goodput import goodput


def served(ttft_s: float, tpot_s: float = 0.01) -> Request:
    one = Request()
    one.k, one.state = 1, "finished"
    one.add(ttft_s)
    one.add(ttft_s + tpot_s)
    return one


def server(limit: float, calls: list[float]):
    """One of ten requests is always late; above the limit two are."""

    def serve(rate: float) -> list[Request]:
        calls.append(rate)
        late = 1 if rate <= limit else 2
        return [served(0.9)] * late + [served(0.1)] * (10 - late)

    return serve


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3, 100.0])
def test_the_highest_rate_in_time_is_found(limit):
    calls: list[float] = []
    assert goodput(server(limit, calls)) == pytest.approx(limit, rel=2e-3)
    assert len(calls) < 25


def test_limits_are_those_given_and_a_slow_server_has_none():
    slow = goodput(server(5.0, []), slo_ttft_s=0.05)
    assert slow == 0.0
    assert goodput(server(5.0, []), slo_tpot_s=0.001) == 0.0
    assert goodput(server(5.0, []), slo_ttft_s=1.0) == math.inf
    with pytest.raises(ConfigError, match="first_rate"):
        goodput(server(5.0, []), first_rate=0.0)
