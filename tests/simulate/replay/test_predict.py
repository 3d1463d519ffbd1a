import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.simulate.replay.lookups import chosen_by_step
from moe_edge.simulate.replay.predict import (
    known_predictors,
    predictor_of,
    replay_predictor,
)
from moe_edge.workload.trace_reader import read_trace
from tests.support.traces import ROUTING, make_trace

TRACE = make_trace(
    [
        *((0, 0, 0, [0, 1]), (0, 0, 1, [2, 3])),
        *((1, 1, 0, [0, 2]), (1, 1, 1, [3, 2])),  # 2 of 2 as before in layer 1
        *((1, 2, 0, [1, 3]), (1, 2, 1, [3, 0])),  # 0 of 2, 1 of 2
    ]
)


def test_previous_token_by_hand_golden():
    result = replay_predictor(TRACE, predictor_of("previous", TRACE), horizon=2)
    # As in an engine nothing is predicted after the prompt.
    assert result.hits_LA.T.tolist() == [[0, 3], [0, 1]]
    assert result.chosen_LA.T.tolist() == [[2, 4], [2, 2]]
    assert result.recall_LA.tolist() == [[0, 0], [0.75, 0.5]]
    assert result.recall_A.tolist() == result.precision_A.tolist() == [0.5, 0.25]


def test_oracle_is_always_right():
    result = replay_predictor(TRACE, predictor_of("oracle", TRACE), horizon=2)
    assert result.recall_LA.tolist() == result.precision_LA.tolist() == [[1, 1], [1, 1]]


def test_predictor_without_knowledge_has_no_precision():
    result = replay_predictor(TRACE, predictor_of("moe_infinity", TRACE))
    assert result.recall_A.tolist() == [0]
    assert np.isnan(result.precision_A).all()


def test_activation_matrix_learns_from_the_sequence_before():
    both = [
        (phase, 3 * turn + step, layer, [expert])
        for turn in range(2)
        for step, phase in enumerate((0, 1, 1))
        for layer, expert in enumerate((1, 3))
    ]
    trace = make_trace(both)
    result = replay_predictor(trace, predictor_of("moe_infinity", trace))
    # The second sequence is the first one again: half of all choices are foreseen.
    assert result.recall_A.tolist() == [0.5]
    assert result.precision_A.tolist() == [1]


def test_chosen_by_step_merges_a_batch():
    trace = make_trace([(1, 4, 0, [2, 1]), (1, 4, 0, [3, 2]), (1, 9, 0, [0])])
    assert chosen_by_step(trace).tolist() == [[[2, 3, 1]], [[0, -1, -1]]]


def test_predictors_that_need_hidden_states_are_refused_by_name():
    assert set(known_predictors(TRACE)) == {
        *("previous", "frequency", "moe_infinity", "oracle")
    }
    with pytest.raises(ConfigError, match="stale_gate needs hidden, .* run the engine"):
        predictor_of("stale_gate", TRACE)
    with pytest.raises(
        ConfigError, match="unknown predictor 'gate'; known: .*previous"
    ):
        predictor_of("gate", TRACE)


def test_previous_token_recall_on_qwen3_golden():
    path = ROUTING / "trace_qwen3_30b_a3b.csv.gz"
    if not path.is_file():
        pytest.skip(f"needs {path} (MOE_EDGE_SHARED names the shared folder)")
    trace = read_trace(path, 128)
    result = replay_predictor(trace, predictor_of("previous", trace))
    assert abs(result.recall_A[0] - 0.380) < 0.005  # algorithms.md, section 6


def test_predicting_nothing_has_a_recall_of_zero():
    result = replay_predictor(TRACE, predictor_of("none", TRACE))
    assert result.chosen_LA.sum() > 0
    assert result.recall_A.tolist() == [0.0]
