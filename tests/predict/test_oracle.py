import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.oracle import Oracle
from tests.predict.support import Shape, rows_of

SHAPE = Shape(num_layers=3, num_experts=6, top_k=2)
# Layer 0 is dense; the second step is of two tokens that share an expert.
CHOSEN = np.array(
    [
        [[-1, -1, -1], [5, 0, -1], [1, 2, -1]],
        [[-1, -1, -1], [3, 4, 0], [2, 5, -1]],
    ]
)


def test_oracle_names_what_will_be_chosen_across_tokens():
    oracle = Oracle(CHOSEN)
    state = oracle.observe(oracle.init(SHAPE), 1, None, None, None)
    assert rows_of(oracle.predict(state, 1, 4)) == [[1, 2], [], [3, 4, 0], [2, 5]]
    state = oracle.observe(state, 2, None, None, None)
    state = oracle.observe(state, 1, None, None, None)
    assert rows_of(oracle.predict(state, 1, 3)) == [[2, 5], [], []]
    state = oracle.observe(state, 2, None, None, None)
    assert oracle.predict(state, 2, 2)[0].shape == (2, 0)


def test_oracle_scores_by_rank_and_pads_what_is_past_the_end():
    oracle = Oracle(CHOSEN)
    state = {"step": 1, "layer": 1}
    ids, scores = oracle.predict(state, 1, 2)
    assert ids.dtype == np.int32 and scores.dtype == np.float32
    assert ids.tolist() == [[2, 5], [-1, -1]]
    np.testing.assert_allclose(scores, [[1.0, 2 / 3], [-1.0, -1.0]])
    ids[:] = 0  # what a caller does with a prediction stays its own affair
    assert rows_of(oracle.predict(state, 1, 1)) == [[2, 5]]


def test_oracle_of_empty_steps_names_nothing():
    oracle = Oracle(np.zeros((2, 3, 0), np.int32))
    assert oracle.predict({"step": 0, "layer": 0}, 0, 2)[0].shape == (2, 0)


def test_oracle_recall_and_precision_are_one():
    oracle, log = Oracle(CHOSEN), PredictionLog(3, 6, look_ahead=2)
    state = oracle.init(SHAPE)
    for step in range(2):
        for layer in (1, 2):
            ids = np.where(CHOSEN[step, layer] < 0, 6, CHOSEN[step, layer])[None]
            log.chosen(layer, ids)
            state = oracle.observe(state, layer, None, ids, None)
            log.expect(layer, oracle.predict(state, layer, 2)[0])
    assert log.rounds_LA.tolist() == [[0, 0], [0, 1], [2, 0]]
    assert log.summary()["recall"] == log.summary()["precision"] == [1.0, 1.0]


def test_oracle_rejects_trace_of_another_model():
    with pytest.raises(ConfigError, match="3 layers and experts up to 5, the model 4"):
        Oracle(CHOSEN).init(Shape(4, 6, 2))
    with pytest.raises(ConfigError, match="experts up to 5, .* and 5 experts"):
        Oracle(CHOSEN).init(Shape(3, 5, 2))
    with pytest.raises(ConfigError, match=r"chosen_SLK has shape \(2, 3\)"):
        Oracle(CHOSEN[0, :2])
