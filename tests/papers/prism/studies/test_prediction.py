"""Predicted beside simulated latency: sums by hand."""

import pytest

from moe_edge.papers.prism.studies.prediction import Pair, over_least, told_apart

# By seed: predictions order a before b before c, and simulations b, a, c.
SEEDS = [
    {"a": Pair(1.0, 2.0), "b": Pair(2.0, 1.0), "c": Pair(3.0, 4.0)},
    {"a": Pair(1.0, 1.0), "b": Pair(2.0, 1.01), "c": Pair(3.0, 4.0)},
]


def test_pairs_are_right_if_both_order_them_alike():
    assert told_apart(SEEDS[:1], 0.02) == (2, 3)
    assert told_apart(SEEDS, 0.02) == (4, 5)  # a and b of the second seed are equal
    assert told_apart(SEEDS, 0.0) == (5, 6)
    assert told_apart(SEEDS, 0.0, ("a", "b")) == (1, 2)


def test_what_the_best_prediction_loses():
    assert over_least(SEEDS) == pytest.approx([2.0, 1.0])
