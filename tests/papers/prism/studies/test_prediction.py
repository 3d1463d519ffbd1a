"""Predicted beside simulated latency: sums by hand."""

import pytest

from moe_edge.metrics.frames import Rows, tables
from moe_edge.papers.prism.studies.prediction import (
    METHODS,
    STUDY,
    Pair,
    derive,
    over_least,
    tell_points,
    told_apart,
)

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


def test_rows_hold_ratios_and_all_pairs():
    rows = Rows(STUDY.frames)
    seed = {m: Pair(2.0 * n, 1.0 * n) for n, m in enumerate(METHODS, 1)}
    tell_points(rows, {("w", "m", ""): [seed, seed]}, 0.02)
    found = tables(rows.stored())
    assert set(found["methods"].over) == {2.0} and set(found["methods"].over_n) == {2}
    count = len(METHODS) * (len(METHODS) - 1)  # of both seeds
    assert found["pairs"].right.tolist() == found["pairs"].pairs.tolist() == [count, 12]
    assert derive(found)["over"] == {"p10": 2.0, "p50": 2.0, "p90": 2.0}
