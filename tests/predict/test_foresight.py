import numpy as np

from moe_edge.predict.base import Predictor
from moe_edge.predict.foresight import Foresight
from moe_edge.predict.registry import get_predictor
from tests.predict.support import Shape

SHAPE = Shape(num_layers=2, num_experts=6, top_k=2)


def ids(*experts):
    return np.array([experts], np.int32)


def test_foresight_counts_what_was_named_and_chosen():
    foresight = Foresight(get_predictor("previous"), SHAPE, horizon=1)
    foresight.observe(1, ids(2, 3), None)
    assert foresight.predict(0).tolist() == [[2, 3]]
    foresight.observe(1, ids(3, 4), None)
    assert foresight.accuracy.recall_LA[1].tolist() == [0.5]
    foresight.reset_accuracy()
    assert foresight.accuracy.rounds_LA.sum() == 0
    assert foresight.predict(0).tolist() == [[3, 4]]  # what it has seen stays


def test_foresight_learns_past_sequences_without_counting_them():
    foresight = Foresight(get_predictor("moe_infinity"), SHAPE, horizon=1)
    foresight.observe(0, ids(0, 1), None)
    assert foresight.predict(0).size == 0  # knows no sequence like this one
    foresight.restart()
    foresight.learn([{0: ids(0, 1), 1: ids(2, 3)}, {0: ids(4, 5), 1: ids(5, 4)}])
    assert foresight.accuracy.rounds_LA.sum() == 0
    foresight.observe(0, ids(0, 1), None)
    assert set(foresight.predict(0)[0].tolist()) == {2, 3}
    foresight.restart()
    foresight.observe(0, ids(0, 1), None)
    assert foresight.predict(0).size == 0


def test_foresight_counts_only_where_asked():
    foresight = Foresight(get_predictor("previous"), SHAPE, horizon=1)
    foresight.observe(1, ids(2, 3), None)
    foresight.predict(0)
    foresight.observe(1, ids(4, 5), None, counts=False)
    assert foresight.accuracy.rounds_LA.sum() == 0
    assert foresight.predict(0).tolist() == [[4, 5]]


def test_foresight_compares_nothing_across_sequences():
    foresight = Foresight(get_predictor("previous"), SHAPE, horizon=1)
    foresight.observe(1, ids(2, 3), None)
    foresight.predict(0)
    foresight.finish_sequence()
    foresight.observe(1, ids(2, 3), None)
    assert foresight.accuracy.rounds_LA.sum() == 0


def test_foresight_of_no_predictor_counts_only_where_it_is_asked():
    foresight = Foresight(Predictor(), SHAPE, horizon=1)
    assert foresight.is_idle
    foresight.observe(1, ids(0, 1), None)
    assert foresight.accuracy.rounds_LA.sum() == 0
    assert foresight.predict(0).shape == (1, 0)
    foresight.observe(1, ids(0, 1), None)
    assert foresight.accuracy.recall_LA[1].tolist() == [0.0]


def test_foresight_hands_a_device_predictor_only_what_programs_computed():
    foresight = Foresight(get_predictor("smoe_partial"), SHAPE, horizon=1)
    before = foresight.state
    foresight.observe(0, ids(0, 1), None)
    foresight.learn([{0: ids(0, 1)}])
    assert foresight.state is before
    wanted_NE = np.array([[-1, -1, 0.2, -1, 0.9, -1]], np.float32)
    foresight.store(0, wanted_NE)
    assert foresight.predict(0).tolist() == [[4, 2]]
