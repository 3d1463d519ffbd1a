import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.simulate.replay.lookups import (
    check_horizon,
    equal_slots,
    expert_counts,
    known_policies,
    lookups,
    policy_of,
    slots_for,
)
from tests.support.traces import make_trace, one_layer

TRACE = make_trace(
    [(0, 0, 1, [0, 1]), (1, 1, 1, [2, 3]), (1, 1, 1, [2]), (0, 2, 1, [0, 1])]
)


def test_lookups_come_padded_and_mark_new_sequences():
    found = list(lookups(TRACE))
    assert [r.ids_TK.tolist() for r in found] == [[[0, 1]], [[2, 3], [2, 4]], [[0, 1]]]
    assert [r.new_sequence for r in found] == [False, False, True]
    assert [(r.phase, r.step, r.layer) for r in found] == [
        (0, 0, 1),
        (1, 1, 1),
        (0, 2, 1),
    ]


def test_lookups_with_scores_are_float32():
    trace = one_layer([], [0, 1], scores_TE=np.eye(2, 4, dtype=np.float16))
    scores = [r.scores_TE for r in lookups(trace)]
    assert scores[1].dtype == np.float32
    assert scores[1].tolist() == [[0, 1, 0, 0]]


def test_equal_slots_leave_out_layers_that_do_not_route():
    assert equal_slots(TRACE, 2) == (1, 1)
    with pytest.raises(ConfigError, match="1 slots a layer, expected at least 2"):
        equal_slots(TRACE, 1)


def test_expert_counts_are_those_of_one_phase():
    assert expert_counts(TRACE, 1).tolist() == [[0, 0, 0, 0], [0, 0, 2, 1]]


def test_policy_needs_are_named_with_a_remedy():
    with pytest.raises(ConfigError, match="smoe_score needs scores, .* scores.npz"):
        policy_of("smoe_score", TRACE)
    with pytest.raises(ConfigError, match="policy 'lruu'; did you mean 'lru'"):
        policy_of("lruu", TRACE)
    known = known_policies(TRACE)
    assert {"lru", "lfu", "belady", "static_oracle", "static_prompt"} <= set(known)
    assert not {"smoe_score", "hybrimoe"} & set(known)
    scored = one_layer([0], [1], scores_TE=np.ones((2, 4), np.float16))
    assert {"smoe_score", "hybrimoe"} <= set(known_policies(scored))
    assert policy_of("static_prompt", TRACE).prompt_steps == 1


def test_horizon_beyond_the_layers_is_rejected():
    with pytest.raises(ConfigError, match="horizon 3, expected at most the 2 layers"):
        check_horizon(3, TRACE)


def test_slot_plan_of_the_prompt_has_the_same_total():
    # Layer 0's prompt is all expert 0; layer 1's choices are spread over four.
    rows = [(0, s, layer, [s % 4 * layer]) for s in range(8) for layer in (0, 1)]
    trace = make_trace([*rows, (1, 8, 0, [0]), (1, 8, 1, [0])])
    assert slots_for("lru", trace, 3) == (0, 0, 0, 1, 1, 1)
    assert slots_for("adapmoe_dp", trace, 3) == (0, 0, 1, 1, 1, 1)
    assert policy_of("adapmoe_dp", trace).name == "lru"
