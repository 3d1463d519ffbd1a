"""History predictors on choices small enough to follow by hand."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.predict.base import best_first, get_predictor, rank_scores, target_layers
from moe_edge.predict.history import Frequency, PreviousToken
from tests.predict.support import Shape, rows_of

SHAPE = Shape(num_layers=3, num_experts=5, top_k=2)


def observe(predictor, state, layer, ids):
    return predictor.observe(state, layer, None, np.array(ids, np.int32), None)


def test_target_layers_wrap_to_the_next_token():
    assert target_layers(1, 4, 3).tolist() == [2, 0, 1, 2]


def test_best_first_sorts_ties_to_the_lower_id_and_pads():
    ids, scores = best_first([[0.5, -1, 0.5, 0.7], [-1, -1, 0.0, -1]])
    assert ids.dtype == np.int32 and scores.dtype == np.float32
    assert ids.tolist() == [[3, 0, 2], [2, -1, -1]]
    np.testing.assert_allclose(scores, [[0.7, 0.5, 0.5], [0, -1, -1]])
    assert best_first(np.full((2, 4), -1.0))[0].shape == (2, 0)


def test_rank_scores_take_the_best_rank_and_drop_padding():
    scores_E = rank_scores(np.array([[4, 1], [1, 0], [5, 5]]), 5)
    np.testing.assert_allclose(scores_E, [0.5, 1.0, -1, -1, 1.0])


def test_previous_token_names_the_layers_last_choice():
    predictor = PreviousToken()
    state = predictor.init(SHAPE)
    assert predictor.predict(state, 0, 2)[0].shape == (2, 0)
    for layer, ids in ((0, [[3, 1]]), (1, [[0, 2]]), (2, [[4, 0]])):
        before, state = state, observe(predictor, state, layer, ids)
        assert (before["last_LE"][layer] == -1).all(), "states are never changed"
    # The current token's layer 0, then what layer 1 chose for the token before.
    state = observe(predictor, state, 0, [[2, 4]])
    ids, scores = predictor.predict(state, 0, 3)
    assert ids.tolist() == [[0, 2], [4, 0], [2, 4]]
    np.testing.assert_allclose(scores, [[1, 0.5]] * 3)
    fresh = predictor.init(SHAPE)
    assert predictor.finish_sequence(state, fresh) is fresh


def test_previous_token_of_a_batch_is_the_union_best_rank_first():
    predictor = PreviousToken()
    state = observe(predictor, predictor.init(SHAPE), 1, [[3, 1], [1, 4], [5, 5]])
    assert rows_of(predictor.predict(state, 0, 2)) == [[1, 3, 4], []]


def test_frequency_names_as_many_as_the_last_layer_chose():
    predictor = Frequency()
    state = predictor.init(SHAPE)
    state = observe(predictor, state, 1, [[0, 2], [2, 3], [2, 0], [5, 5]])
    state = observe(predictor, state, 0, [[1, 4]])
    ids, scores = predictor.predict(state, 0, 1)
    assert ids.tolist() == [[2, 0]]
    np.testing.assert_allclose(scores, [[3 / 6, 2 / 6]], rtol=1e-6)


def test_frequency_with_decay_prefers_the_recent():
    chosen = [[[0, 1]], [[0, 1]], [[2, 3]]]
    for decay, expected in ((1.0, [0, 1]), (0.5, [2, 3])):
        predictor = get_predictor("frequency", decay=decay)
        state = predictor.init(SHAPE)
        for ids in chosen:
            state = observe(predictor, state, 1, ids)
        assert rows_of(predictor.predict(state, 0, 1)) == [expected]


@pytest.mark.parametrize("decay", [0.0, 1.5, float("nan")])
def test_frequency_rejects_decay(decay):
    with pytest.raises(ConfigError, match=rf"decay must lie in \(0, 1\], got {decay}"):
        Frequency(decay=decay)
