import numpy as np

from moe_edge.predict.base import Predictor
from moe_edge.predict.predictor_run import PredictorRun
from moe_edge.predict.registry import get_predictor
from tests.predict.support import Shape

SHAPE = Shape(num_layers=2, num_experts=6, top_k=2)


def ids(*experts):
    return np.array([experts], np.int32)


def test_foresight_counts_what_was_named_and_chosen():
    predictor_run = PredictorRun(get_predictor("previous"), SHAPE, horizon=1)
    predictor_run.observe(1, ids(2, 3), None)
    assert predictor_run.predict(0).tolist() == [[2, 3]]
    predictor_run.observe(1, ids(3, 4), None)
    assert predictor_run.accuracy.recall_LA[1].tolist() == [0.5]
    predictor_run.reset_accuracy()
    assert predictor_run.accuracy.rounds_LA.sum() == 0
    assert predictor_run.predict(0).tolist() == [[3, 4]]  # what it has seen stays


def test_foresight_learns_past_sequences_without_counting_them():
    predictor_run = PredictorRun(get_predictor("moe_infinity"), SHAPE, horizon=1)
    predictor_run.observe(0, ids(0, 1), None)
    assert predictor_run.predict(0).size == 0  # knows no sequence like this one
    predictor_run.restart()
    predictor_run.learn([{0: ids(0, 1), 1: ids(2, 3)}, {0: ids(4, 5), 1: ids(5, 4)}])
    assert predictor_run.accuracy.rounds_LA.sum() == 0
    predictor_run.observe(0, ids(0, 1), None)
    assert set(predictor_run.predict(0)[0].tolist()) == {2, 3}
    predictor_run.restart()
    predictor_run.observe(0, ids(0, 1), None)
    assert predictor_run.predict(0).size == 0


def test_foresight_counts_only_where_asked():
    predictor_run = PredictorRun(get_predictor("previous"), SHAPE, horizon=1)
    predictor_run.observe(1, ids(2, 3), None)
    predictor_run.predict(0)
    predictor_run.observe(1, ids(4, 5), None, counts=False)
    assert predictor_run.accuracy.rounds_LA.sum() == 0
    assert predictor_run.predict(0).tolist() == [[4, 5]]


def test_foresight_compares_nothing_across_sequences():
    predictor_run = PredictorRun(get_predictor("previous"), SHAPE, horizon=1)
    predictor_run.observe(1, ids(2, 3), None)
    predictor_run.predict(0)
    predictor_run.finish_sequence()
    predictor_run.observe(1, ids(2, 3), None)
    assert predictor_run.accuracy.rounds_LA.sum() == 0


def test_foresight_of_no_predictor_counts_only_where_it_is_asked():
    predictor_run = PredictorRun(Predictor(), SHAPE, horizon=1)
    assert predictor_run.is_idle
    predictor_run.observe(1, ids(0, 1), None)
    assert predictor_run.accuracy.rounds_LA.sum() == 0
    assert predictor_run.predict(0).shape == (1, 0)
    predictor_run.observe(1, ids(0, 1), None)
    assert predictor_run.accuracy.recall_LA[1].tolist() == [0.0]


def test_foresight_hands_a_device_predictor_only_what_programs_computed():
    predictor_run = PredictorRun(get_predictor("smoe_partial"), SHAPE, horizon=1)
    before = predictor_run.state
    predictor_run.observe(0, ids(0, 1), None)
    predictor_run.learn([{0: ids(0, 1)}])
    assert predictor_run.state is before
    wanted_NE = np.array([[-1, -1, 0.2, -1, 0.9, -1]], np.float32)
    predictor_run.store(0, wanted_NE)
    assert predictor_run.predict(0).tolist() == [[4, 2]]
