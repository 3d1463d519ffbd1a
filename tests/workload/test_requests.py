import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.workload.requests import (
    LENGTHS,
    Lengths,
    Request,
    check_requests,
    fixed_requests,
    make_requests,
)

TIMES = [np.array([1.0, 3.0]), np.array([2.0])]


def test_requests_are_numbered_in_order_of_arrival():
    rows = make_requests(["ascii", "taco"], TIMES, seed=1)
    assert [(r.id, r.server, r.arrival_s) for r in rows] == [
        (0, 0, 1.0),
        (1, 1, 2.0),
        (2, 0, 3.0),
    ]
    assert rows == make_requests(["ascii", "taco"], TIMES, seed=1)
    assert rows != make_requests(["ascii", "taco"], TIMES, seed=2)
    assert rows[1].output_tokens == 20


def test_lengths_have_the_stated_mean_and_limit():
    sizes = Lengths(100.0, 0.5, 50.0, 1.0, most_output=60).draw(
        20_000, np.random.default_rng(0)
    )
    assert sizes[:, 0].mean() == pytest.approx(100, rel=0.02)
    assert sizes[:, 0].std() == pytest.approx(50, rel=0.05)
    assert sizes.min() >= 1 and sizes[:, 1].max() == 60
    assert set(LENGTHS) >= {"arithmetic", "wikitext"}


def test_fixed_requests_are_all_alike():
    rows = fixed_requests(["c4", "c4"], TIMES, 7, 5)
    assert {(r.input_tokens, r.output_tokens) for r in rows} == {(7, 5)}


GOOD = Request(0, 0, 1.0, 3, 2, "a")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"arrival_s": -1.0}, "request 0 arrives at -1.0 s, expected 0.0 s or later"),
        ({"arrival_s": float("nan")}, "arrives at nan s"),
        ({"server": 2}, "for server 2, expected 0 to 1"),
        ({"output_tokens": 0}, "3 input and 0 output tokens"),
        ({"id": 4}, "request 0 has id 4"),
    ],
)
def test_bad_requests_are_refused(change, message):
    check_requests([GOOD], 2, ("a",))
    with pytest.raises(RequestError, match=message):
        check_requests([dataclasses.replace(GOOD, **change)], 2, ("a",))


def test_bad_lists_are_refused():
    with pytest.raises(RequestError, match="no request to serve"):
        check_requests([], 2, ("a",))
    later = dataclasses.replace(GOOD, id=1, arrival_s=0.5)
    with pytest.raises(RequestError, match="0.5 s, expected 1.0 s or later: sort"):
        check_requests([GOOD, later], 2, ("a",))
    with pytest.raises(ConfigError, match="unknown routing domain 'a'; known: b"):
        check_requests([GOOD], 2, ("b",))
    with pytest.raises(ConfigError, match="2 arrivals for 1 domains"):
        make_requests(["c4"], TIMES)
    with pytest.raises(
        ConfigError, match="input_mean must be 0 or more and finite, got -3"
    ):
        Lengths(-3, 0, 1, 0)
