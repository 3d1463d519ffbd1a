import numpy as np

from moe_edge.predict.base import Predictor, get_predictor
from moe_edge.predict.predictor_run import PredictorRun
from moe_edge.predict.stale_gate import DevicePredictor
from tests.predict.support import Shape

SHAPE = Shape(num_layers=2, num_experts=6, top_k=2)


def ids(*experts):
    return np.array([experts], np.int32)


def test_run_counts_what_was_named_and_chosen():
    predictor_run = PredictorRun(get_predictor("previous"), SHAPE, horizon=1)
    predictor_run.observe(1, ids(2, 3), None)
    assert predictor_run.predict(0).tolist() == [[2, 3]]
    predictor_run.observe(1, ids(3, 4), None)
    assert predictor_run.accuracy.recall_LA[1].tolist() == [0.5]
    predictor_run.reset_accuracy()
    assert predictor_run.accuracy.rounds_LA.sum() == 0
    assert predictor_run.predict(0).tolist() == [[3, 4]]  # what it has seen stays


def test_run_learns_past_sequences_without_counting_them():
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


def test_run_counts_only_where_asked():
    predictor_run = PredictorRun(get_predictor("previous"), SHAPE, horizon=1)
    predictor_run.observe(1, ids(2, 3), None)
    predictor_run.predict(0)
    predictor_run.observe(1, ids(4, 5), None, counts=False)
    assert predictor_run.accuracy.rounds_LA.sum() == 0
    assert predictor_run.predict(0).tolist() == [[4, 5]]


def test_run_compares_nothing_across_sequences():
    predictor_run = PredictorRun(get_predictor("previous"), SHAPE, horizon=1)
    predictor_run.observe(1, ids(2, 3), None)
    predictor_run.predict(0)
    predictor_run.finish_sequences()
    predictor_run.observe(1, ids(2, 3), None)
    assert predictor_run.accuracy.rounds_LA.sum() == 0


def test_run_of_no_predictor_counts_only_where_it_is_asked():
    predictor_run = PredictorRun(Predictor(), SHAPE, horizon=1)
    assert predictor_run.is_idle
    predictor_run.observe(1, ids(0, 1), None)
    assert predictor_run.accuracy.rounds_LA.sum() == 0
    assert predictor_run.predict(0).shape == (1, 0)
    predictor_run.observe(1, ids(0, 1), None)
    assert predictor_run.accuracy.recall_LA[1].tolist() == [0.0]


def test_run_hands_a_device_predictor_only_what_programs_computed():
    predictor_run = PredictorRun(DevicePredictor(), SHAPE, horizon=1)
    before = predictor_run.state
    predictor_run.observe(0, ids(0, 1), None)
    predictor_run.learn([{0: ids(0, 1)}])
    assert predictor_run.state is before
    wanted_NE = np.array([[-1, -1, 0.2, -1, 0.9, -1]], np.float32)
    predictor_run.store(0, wanted_NE)
    assert predictor_run.predict(0).tolist() == [[4, 2]]


def test_run_keeps_a_record_of_every_sequence():
    predictor_run = PredictorRun(get_predictor("previous"), SHAPE, horizon=1)
    both = np.array([[2, 3], [4, 3]], np.int32)
    predictor_run.observe(1, both, None, sequence_T=np.array([7, 9]))
    assert predictor_run.predict(0).tolist() == [[2, 4, 3]]  # by best score
    # Row 7 has ended; the other one alone is asked about.
    rest = np.array([[6, 6], [0, 1]], np.int32)
    predictor_run.observe(1, rest, None, sequence_T=np.array([7, 9]))
    assert predictor_run.predict(0).tolist() == [[0, 1]]
    predictor_run.finish_sequences(running=(7,))
    predictor_run.observe(0, ids(5, 4), None, sequence_T=7)
    assert predictor_run.predict(0).tolist() == [[2, 3]]  # its own record stays
    predictor_run.finish_sequences()
    predictor_run.observe(0, ids(5, 4), None, sequence_T=7)
    assert predictor_run.predict(0).size == 0


def test_run_shares_what_ended_sequences_taught():
    predictor_run = PredictorRun(get_predictor("moe_infinity"), SHAPE, horizon=1)
    for layer, rows in ((0, [[0, 1], [4, 5]]), (1, [[2, 3], [5, 4]])):
        ids_TK = np.array(rows, np.int32)
        predictor_run.observe(layer, ids_TK, None, sequence_T=np.array([3, 4]))
    predictor_run.finish_sequences(running=(4,))
    predictor_run.finish_sequences()
    assert predictor_run.state["finished"] == 2
    for sequence, chosen, expected in ((5, (0, 1), {2, 3}), (6, (4, 5), {4, 5})):
        predictor_run.observe(0, ids(*chosen), None, sequence_T=sequence)
        assert set(predictor_run.predict(0)[0].tolist()) == expected
