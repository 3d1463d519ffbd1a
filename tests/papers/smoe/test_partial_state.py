import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.smoe.partial_state import PartialState
from tests.predict.support import Shape, rows_of


def test_partial_state_predicts_one_layer_after_its_own():
    predictor = PartialState()
    state = predictor.init(Shape(4, 3, 1))
    assert predictor.predict(state, 1, 2)[0].shape == (2, 0)
    state = predictor.store(state, 1, np.array([[0.2, -1, 0.7]], np.float32))
    assert rows_of(predictor.predict(state, 1, 2)) == [[2, 0], []]
    assert rows_of(predictor.predict(state, 2, 1)) == [[]]


@pytest.mark.parametrize("top_a", [-0.1, 1.0, float("nan")])
def test_partial_state_rejects_a(top_a):
    with pytest.raises(ConfigError, match=rf"top_a must lie in \[0, 1\), got {top_a}"):
        PartialState(top_a=top_a)
