"""Several tokens looked up together, against one after another, by hand."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import get_eviction
from moe_edge.simulate.replay.drafts import break_even, replay_drafts
from moe_edge.workload.traces import DECODE, PREFILL, Trace


def trace_of(ids_SK, *, request=None, first_decode=0) -> Trace:
    """One layer, a step a row."""
    ids_TK = np.array(ids_SK, np.int32)
    T = len(ids_TK)
    phase = np.where(np.arange(T) < first_decode, PREFILL, DECODE)
    return Trace(
        num_experts=6,
        top_k=2,
        request=np.zeros(T, np.int32) if request is None else np.array(request),
        phase=phase.astype(np.int32),
        step=np.arange(T, dtype=np.int32),
        layer=np.zeros(T, np.int32),
        ids_TK=ids_TK,
        weights_TK=np.full(ids_TK.shape, 0.5, np.float32),
    )


def lru():
    return get_eviction("lru")


def test_steps_of_two_share_and_miss_by_hand():
    trace = trace_of([[0, 1], [1, 2], [3, 0], [3, 4]])
    found = replay_drafts(trace, 2, [4], lru)
    assert found.reused == 2 / 8  # 1 and 3 stand twice
    # Four slots: one by one 0 1 | 2 | 3 | 4, so 5; together 0 1 2 | 3 4, so 5.
    assert found.misses_left == {4: 1.0}
    assert found.break_even[4] == 1.0
    # Without a cache six loads for four tokens of two: 1 + a = 1.5.
    assert found.break_even[0] == pytest.approx(0.5)


def test_prompts_and_rests_of_a_request_are_left_out():
    """A request's odd last step joins no other request's."""
    ids = [[5, 4], [0, 1], [0, 1], [2, 3], [0, 1], [0, 1]]
    trace = trace_of(ids, request=[0, 0, 0, 0, 1, 1], first_decode=1)
    found = replay_drafts(trace, 2, [2], lru)
    assert found.reused == 0.5
    # Neither way looks at step 3, so both miss 0 and 1 once.
    assert found.misses_left == {2: 1.0} and found.break_even[0] < 1e-9
    with pytest.raises(ConfigError, match="has no 4 decode steps in a row of one"):
        replay_drafts(trace, 4, [2], lru)


def test_break_even_inverts_the_tokens_of_a_step():
    for accepted in (0.0, 0.3, 0.9):
        cost = sum(accepted**i for i in range(4))
        assert break_even(cost, 4) == pytest.approx(accepted, abs=1e-9)
    assert break_even(4.5, 4) == 1.0
    assert np.isnan(break_even(float("nan"), 4))


def test_drafts_reject_batches_and_single_tokens():
    trace = trace_of([[0, 1], [1, 2]])
    with pytest.raises(ConfigError, match="drafts of 1 tokens, expected 2 or more"):
        replay_drafts(trace, 1, [2], lru)
    arrays = {name: getattr(trace, name) for name in ("layer", "ids_TK", "weights_TK")}
    both = Trace(
        num_experts=6,
        top_k=2,
        request=np.arange(2, dtype=np.int32),
        phase=np.full(2, DECODE, np.int32),
        step=np.zeros(2, np.int32),
        **arrays,
    )
    with pytest.raises(ConfigError, match="step 0 decodes 2 requests"):
        replay_drafts(both, 2, [2], lru)
