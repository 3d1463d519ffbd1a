"""What papers assume of a model, on numbers that can be checked by hand."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows, tables
from moe_edge.studies.default_model.premises import (
    Halves,
    Text,
    Weights,
    half_sums,
    seen_top,
    weights_of,
)
from moe_edge.studies.default_model.shapes import (
    STUDY,
    Shape,
    ShapeSettings,
    derive,
    parse_shape,
)
from moe_edge.studies.default_model.trials import Trial, tell_trace, tell_trial


def test_shapes_are_read_and_others_refused():
    assert parse_shape("64/8/64") == Shape(64, 8, 64, norm_topk=True)
    assert parse_shape("16/4/256 raw") == Shape(16, 4, 256, norm_topk=False)
    for text in ("64/8", "64/8/64raw", "a/b/c", "64/8/64 even"):
        with pytest.raises(ConfigError, match="expected experts/chosen/neurons such"):
            ShapeSettings(shapes=(text,))


def test_weights_and_shares_by_hand():
    # Chosen .4 and .2; the best other is .19, so .2 is low-score at a = .1.
    scores_TE = np.array([[0.2, 0.1, 0.4, 0.19, 0.11]])
    found = weights_of(iter([scores_TE, scores_TE]), 2, (0.0, 0.1, 0.45))
    np.testing.assert_allclose(found.by_rank_K, [2 / 3, 1 / 3])
    assert found.fall == pytest.approx(2)
    np.testing.assert_allclose(found.top_A, [1, 0.5, 0.5])
    np.testing.assert_allclose(found.alternatives_A, [0, 1, 2])
    np.testing.assert_allclose(found.seen_top_A, [1, 1, 1])


def test_what_a_trace_shows_is_the_rank_before_the_last_against_it():
    weights_TK = np.array([[0.5, 0.3, 0.2], [0.34, 0.33, 0.33]])
    np.testing.assert_allclose(seen_top(weights_TK, (0.0, 0.2, 0.6)), [1, 0.5, 0.25])


def test_halves_of_tokens_that_switch_and_of_tokens_that_do_not():
    rng = np.random.default_rng(0)
    T = 4000
    first_T = rng.random(T) < 0.5
    switching_TU = np.where(
        first_T[:, None], [[1.0, 1.0, 0.1, 0.1]], [[0.1, 0.1, 1.0, 1.0]]
    )
    own, fixed, dealt, whole = half_sums(switching_TU, rng)
    assert own == pytest.approx(2 / 2.2 * whole)
    assert fixed == pytest.approx(0.5 * whole, rel=0.1)
    # Dealt apart, two of four are large together half as often.
    assert fixed < dealt < own
    steady_TU = np.tile([[1.0, 0.8, 0.1, 0.1]], (T, 1))
    own, fixed, dealt, whole = half_sums(steady_TU, rng)
    assert own == pytest.approx(fixed) and own == pytest.approx(dealt)
    assert own == pytest.approx(0.9 * whole)


def test_rows_hold_trials_and_traces_and_the_least_loss_of_real_falls_is_chosen():
    rows = Rows(STUDY.frames)
    for name, loss, fall in (("a", 3.0, 9.0), ("b", 3.2, 2.0), ("c", 3.1, 3.0)):
        weights = Weights(np.array([fall, 1.0]), *np.ones((3, 1)))
        trial = Trial(Text(loss, 0.1, 5.0), weights, Halves(0.6, 0.5, 0.55), 9, 1.0)
        tell_trial(rows, name, trial, (0.1,))
    tell_trace(rows, "trace", np.array([[0.6, 0.4], [0.9, 0.1]]), (0.6,))
    found = tables(rows.stored())
    assert found["shapes"].fall.tolist() == [9.0, 2.0, 3.0, pytest.approx(3.0)]
    assert found["margins"].seen.tolist() == [1.0, 1.0, 1.0, 0.5]
    numbers = derive(found)
    assert list(numbers["trials"].of) == ["a", "b", "c"]
    assert list(numbers["chosen"].of) == ["c"]
