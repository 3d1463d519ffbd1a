import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.link import EmulatedLink
from moe_edge.predict.base import Predictor
from moe_edge.simulate.replay.lookups import equal_slots, policy_of
from moe_edge.simulate.replay.predict import predictor_of
from moe_edge.simulate.replay.timed import CostModel, replay_time
from tests.support.traces import make_trace, one_layer

TRACE = make_trace([(1, 0, 0, [0]), (1, 0, 1, [0]), (1, 1, 0, [1]), (1, 1, 1, [0])])


def costs(transfer_s=3.0, merges=False, **kwargs):
    """Routing 1 s, experts 2 s, 0.5 s a step beside them; 3 bytes a block."""
    link = EmulatedLink(bytes_per_s=3.0, latency_s=transfer_s - 1, merges=merges)
    return CostModel(
        route_s=1.0,
        experts_s=[2.0, 2.0],
        block_bytes=3,
        link=link,
        step_s=0.5,
        **kwargs,
    )


COSTS = costs()


def run(predictor=None, trace=TRACE, slots=2, horizon=1, costs=COSTS):
    predictor = predictor_of(predictor, trace) if predictor == "oracle" else predictor
    layer_S = equal_slots(trace, slots)
    return replay_time(
        trace, policy_of("lru", trace), layer_S, costs, predictor, horizon
    )


@dataclasses.dataclass(frozen=True)
class Scripted(Predictor):
    """Says the next of some lists after every lookup, over and over."""

    script: tuple = ()

    def init(self, spec):
        return {"said": -1}

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        return {"said": state["said"] + 1}

    def predict(self, state, layer, horizon):
        ids = self.script[state["said"] % len(self.script)]
        ids_HM = np.full((horizon, len(ids)), -1, np.int32)
        ids_HM[0] = ids
        return ids_HM, np.ones(ids_HM.shape, np.float32)


def test_time_on_demand_by_hand_golden():
    # Step 0: .5 + 1 routed at 1.5, block 4.5, experts 6.5; 7.5, 10.5, 12.5.
    # Step 1: 14, 17, 19; 20 a hit, 22.
    result = run()
    assert result.step_s.tolist() == [12.5, 9.5]
    assert result.tpot_s == 11
    assert (result.counters.hits, result.counters.late, result.misses) == (1, 0, 3)
    assert (result.moved.demand.bytes, result.moved.prefetch.bytes) == (9, 0)
    assert (result.counters.wait_s, result.resident_s) == (9, 6.5)
    assert result.counters.hit_ratio == 0.25


def test_time_oracle_by_hand_golden():
    # Step 0: routed 1.5, block 4.5, and the link goes on with layer 1's until 7.5,
    # when layer 1 is routed: a hit. Step 1's block travels from 7.5 to 10.5.
    result = run("oracle")
    assert result.step_s.tolist() == [9.5, 6.5]
    assert (result.counters.hits, result.counters.late, result.misses) == (3, 0, 1)
    assert (
        result.moved.demand.bytes,
        result.moved.prefetch.bytes,
        result.counters.wait_s,
    ) == (3, 6, 3)
    assert (
        result.moved.wasted_bytes,
        result.moved.unused_bytes,
        result.moved.cancelled,
    ) == (0, 0, 0)


def test_time_late_prefetch_is_waited_for_and_not_moved_again():
    # 4 s a block: 1.5 to 5.5, then layer 1's to 9.5 while it is routed at 8.5;
    # step 1's block from 9.5 to 13.5, layer 0 routed at 13.
    result = run("oracle", costs=costs(4.0))
    assert result.step_s.tolist() == [11.5, 7.0]
    assert (result.counters.hits, result.counters.late, result.misses) == (1, 2, 1)
    assert (
        result.moved.demand.bytes,
        result.moved.prefetch.bytes,
        result.counters.wait_s,
    ) == (3, 6, 5.5)


ONE_STEP = make_trace([(1, 0, 0, [0]), (1, 0, 1, [0])])


@pytest.mark.parametrize("script, late, cancelled", [((3, 2), 0, 1), ((3, 0), 1, 0)])
def test_time_queued_prefetch_is_cancelled_or_promoted(script, late, cancelled):
    # Layer 1's expert 3 travels from 5.5 to 9.5 and is not interrupted; routing at 8.5
    # finds the second one queued: wrong, it is cancelled; right, it comes next.
    predictor = Scripted((script, ()))
    result = run(predictor, ONE_STEP, slots=4, costs=costs(4.0))
    assert result.step_s.tolist() == [15.5]
    assert (result.counters.late, result.misses) == (late, 2 - late)
    assert result.moved.cancelled == cancelled
    assert (result.moved.demand.bytes, result.moved.prefetch.bytes) == (6, 3)
    assert (result.moved.wasted_bytes, result.moved.unused_bytes) == (0, 3)


def test_time_neighbours_prefetched_together_travel_as_one_golden():
    # Experts 2 and 3 go from 5.5 to 10.5 with one latency of 3 s: neither can be taken
    # back at 8.5, and what layer 1 wants follows until 14.5.
    predictor = Scripted(((3, 2), ()))
    result = run(predictor, ONE_STEP, slots=4, costs=costs(4.0, merges=True))
    assert result.step_s.tolist() == [16.5]
    assert (result.moved.cancelled, result.moved.merged) == (0, 1)
    assert (result.moved.demand.bytes, result.moved.prefetch.bytes) == (6, 6)
    assert result.moved.prefetch.seconds == 5


def test_time_prefetch_overwritten_before_use_is_wasted():
    trace = one_layer([], [0, 0, 0, 0])
    cost = CostModel(1.0, 2.0, 3, EmulatedLink(100.0))
    result = run(Scripted(((1,), (2,), (3,))), trace, costs=cost)
    # The fourth is asked for in the last step and never begun.
    assert (result.moved.wasted_bytes, result.counters.hits, result.misses) == (9, 3, 1)


def test_time_prefetch_never_evicts_what_is_predicted():
    trace = one_layer([], [0, 1, 0, 1])
    cost = CostModel(1.0, 2.0, 3, EmulatedLink(100.0))
    result = run(Scripted(((1, 0, 2, 3),)), trace, costs=cost)
    assert (result.counters.hits, result.misses, result.moved.wasted_bytes) == (3, 1, 0)


def test_time_warm_up_takes_none():
    trace = one_layer([0, 1], [0, 1])
    cost = CostModel(1.0, 2.0, 3, EmulatedLink(1.0))
    result = run(trace=trace, costs=cost)
    assert result.step_s.tolist() == [3, 3]
    assert (result.counters.hits, result.moved.demand.bytes) == (2, 0)


def test_time_waves_wait_for_each_other():
    trace = make_trace([(1, 0, 0, [0, 1, 2])])
    cost = CostModel(1.0, 2.0, 3, EmulatedLink(1.0))
    result = run(trace=trace, costs=cost)
    assert (result.step_s.tolist(), result.misses) == ([1 + 9 + 2], 3)


def test_time_laws_hold_on_a_random_trace():
    rng = np.random.default_rng(1)
    rows = [
        (int(step >= 4), step, layer, rng.choice(8, 2, False))
        for step in range(40)
        for layer in range(3)
    ]
    trace = make_trace(rows, num_experts=8)
    cost = CostModel(1.0, 2.0, 3, EmulatedLink(2.0))
    plain = run(trace=trace, slots=4, costs=cost)
    oracle = run("oracle", trace, slots=4, horizon=2, costs=cost)
    for result in (plain, oracle):
        compute_s = result.resident_s * len(result.step_s)
        assert result.step_s.sum() == pytest.approx(compute_s + result.counters.wait_s)
        assert result.tpot_s >= result.resident_s - 1e-9
        moved = result.moved.demand.bytes + result.moved.prefetch.bytes
        assert result.step_s.sum() >= moved / 3 * 1.5 - 1e-9  # the link's share of it
    assert oracle.tpot_s < plain.tpot_s
    assert oracle.counters.hit_ratio > plain.counters.hit_ratio
    again = run("oracle", trace, slots=4, horizon=2, costs=cost)
    assert again.step_s.tolist() == oracle.step_s.tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"route_s": -1.0}, "route_s must be 0 or more and finite, got -1.0"),
        ({"block_bytes": 0}, "block_bytes must be positive, got 0"),
        ({"experts_s": [1.0] * 3}, r"experts_s has shape \(3,\), expected \(2,\)"),
    ],
)
def test_time_rejects_bad_costs(change, message):
    with pytest.raises(ConfigError, match=message):
        run(costs=dataclasses.replace(costs(), **change))


def test_time_rejects_a_trace_without_decoding():
    with pytest.raises(ConfigError, match="no decode step"):
        run(trace=one_layer([0], []))


@pytest.mark.parametrize("seed", range(4, 9))
def test_time_of_several_prompts_whose_prefetches_are_still_on_their_way(seed):
    rng = np.random.default_rng(seed)
    rows = [
        (int(step % 10 >= 6), step, layer, rng.choice(8, 2, False))
        for step in range(30)
        for layer in range(4)
    ]
    trace = make_trace(rows, num_experts=8)
    cost = CostModel(1.0, 2.0, 3, EmulatedLink(0.5))
    result = run("oracle", trace, slots=4, horizon=3, costs=cost)
    assert len(result.step_s) == 12
    compute_s = result.resident_s * len(result.step_s)
    assert result.step_s.sum() == pytest.approx(compute_s + result.counters.wait_s)
