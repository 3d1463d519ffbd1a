import json

import numpy as np
import pytest

from moe_edge.papers.moe_prism.studies.operating_points import (
    StepTimes,
    operating_points,
)


def test_operating_points_are_those_that_buy_something():
    for curve, points in (
        ({1: (1.0, 9.0), 2: (2.0, 8.0), 3: (3.0, 7.0)}, [1, 2, 3]),
        ({1: (1.0, 9.0), 2: (2.0, 9.5), 3: (3.0, 7.0)}, [1, 3]),  # 2 is worse than 1
        ({1: (2.5, 9.0), 2: (2.0, 8.0), 3: (3.0, 7.0)}, [2, 3]),  # 1 is slower than 2
        ({1: (1.0, 9.0), 2: (1.009, 8.0), 3: (3.0, 7.0)}, [1, 3]),  # 2 is as fast as 1
        ({1: (1.0, 9.0), 2: (2.0, 8.999), 3: (3.0, 7.0)}, [1, 3]),  # 2 is as good
        ({1: (1.0, 7.0), 2: (2.0, 7.0)}, [1]),
        ({}, []),
    ):
        assert operating_points(curve) == points, curve


def test_operating_points_of_a_fine_grid_keep_their_distance():
    curve = {k: (1.012**k, 60.0 * 0.99**k) for k in range(32)}
    for distinct in (0.0119, 0.0121, 0.024, 0.03, 0.1):
        # Every so many steps that the distance is exceeded: no chain swallows the grid.
        stride = int(np.log1p(distinct) / np.log(1.012)) + 1
        assert operating_points(curve, distinct) == list(range(0, 32, stride))


def times(error=0.01, rounds=400):
    """Times that double with K; rounds share a drift, and differ by `error`."""
    rng = np.random.default_rng(0)
    drift_R = rng.normal(0, 0.3, rounds)
    return StepTimes(
        {
            ("a", k, batch): np.exp(
                np.log(k * batch) + drift_R + rng.normal(0, error * batch, rounds)
            ).tolist()
            for k in (1, 2, 4)
            for batch in (1, 3)
        }
    )


def test_error_is_that_of_paired_differences_by_batch():
    found = times()
    # A difference of two has sqrt(2) of one's error; the drift is common to both.
    for batch in (1, 3):
        expected = 0.01 * batch * np.sqrt(2 / 400)
        assert found.error(batch) == pytest.approx(expected, rel=0.1)
    assert times(rounds=4).error(3) > 0.005


def test_seconds_are_the_rounds_geometric_mean():
    found = StepTimes({("a", 2, 1): [1.0, 4.0], ("a", 1, 1): [1.0, 1.0]})
    assert found.seconds("a", 2, 1) == pytest.approx(2.0)
    assert found.ks("a", 1) == [1, 2] and found.ks("b", 1) == []
    rows = json.loads(found.to_json())
    assert rows[0] == {"model": "a", "k": 2, "batch": 1, "step_s": [1.0, 4.0]}
