import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.model.config import MoeConfig
from moe_edge.offload.evict_base import get_eviction
from moe_edge.offload.link import EmulatedLink
from moe_edge.planner.replayed import Recorded
from moe_edge.route.base import get_route
from moe_edge.simulate.replay.recorded import Replayed, rerouted, with_prompts
from moe_edge.simulate.replay.timed import CostModel, replay_time
from tests.support.traces import make_trace

COSTS = CostModel(1.0, 1.0, 1, EmulatedLink(1.0))


def two_prompts(scores_TE=None):
    """Two layers; a prompt of two tokens and two decode steps, twice."""
    rows, step = [], 0
    for _ in range(2):
        for phase in (0, 0, 1, 1):
            rows += [
                (phase, step, layer, [step % 4, (step + 1) % 4]) for layer in (0, 1)
            ]
            step += 1
    return make_trace(rows, scores_TE=scores_TE)


def test_first_batches_and_their_predictions():
    predicted = [np.full((1, 1), i) for i in range(8)]
    recorded = Recorded(two_prompts(), {"mine": predicted})
    assert recorded.batch_T.tolist() == [0] * 8 + [1] * 8
    first = recorded.first(1)
    assert len(first.trace.step) == 8 and first.predicted["mine"] == predicted[:4]
    assert recorded.first(2) is recorded
    assert recorded.decode_steps.tolist() == [2, 3, 6, 7]


def test_at_k_keeps_the_best_experts():
    cut = Recorded(two_prompts(), {}).at_k(1)
    assert cut.trace.top_k == 1 and cut.trace.ids_TK.shape == (16, 1)
    assert cut.trace.ids_TK[:, 0].tolist() == two_prompts().ids_TK[:, 0].tolist()
    assert cut.at_k(None) is cut


def test_prompt_blocks_are_distinct_experts_less_slots():
    recorded = Recorded(two_prompts(), {})
    assert recorded.prompt_blocks(()) == 6  # three experts in each of two layers
    assert recorded.prompt_blocks((-1,) * 4) == 3  # half of the eight blocks


def test_predictions_stand_behind_what_prompts_show():
    predicted = [np.full((1, 1), i) for i in range(8)]
    found = with_prompts(two_prompts(), predicted)
    shown = [None if each is None else int(each[0, 0]) for each in found]
    assert shown == [None, None, 0, 1, 2, 3, None, None, 4, 5, 6, 7]


def test_replay_of_perfect_predictions_over_sequences_waits_for_nothing():
    """Its predictions stay in step with the lookups where a second prompt begins."""
    trace = two_prompts()
    chosen = [trace.ids_TK[i] for i in range(len(trace.step)) if trace.phase[i] == 1]
    ahead = [row[None] for row in chosen[1:]] + [None]
    link = EmulatedLink(1e9)
    costs = CostModel(1.0, 1.0, 1, link)
    layer_S = (0, 0, 0, 0, 1, 1, 1, 1)
    replayed = Replayed(with_prompts(trace, ahead))
    timed = replay_time(trace, get_eviction("lru"), layer_S, costs, replayed)
    assert timed.misses <= 2 and timed.counters.hits >= 14
    assert timed.moved.cancelled == 0


def test_lossy_route_is_replayed_by_what_is_resident():
    scores_TE = np.tile(np.array([0.4, 0.3, 0.2, 0.1], np.float16), (16, 1))
    trace = two_prompts(scores_TE)
    moe = MoeConfig(num_experts=4, top_k=2, expert_dim=8)
    route = get_route("drop", threshold=0.9)
    layer_S = (0, 0, 1, 1)
    given = trace, get_eviction("lru"), layer_S, COSTS
    plain = replay_time(*given)
    dropped = replay_time(*given, reroute=rerouted(route, moe))
    assert dropped.counters.misses < plain.counters.misses
    assert dropped.tpot_s < plain.tpot_s
    same = replay_time(*given, reroute=rerouted(get_route("drop", threshold=0.0), moe))
    assert same.counters == plain.counters


def test_predictor_that_was_not_recorded_is_refused():
    from moe_edge.planner.replayed import play

    options = OffloadOptions(predictor="previous")
    with pytest.raises(ConfigError, match="what predictor previous says was not rec"):
        play(Recorded(two_prompts(), {}), options, None, None)


def test_sequences_are_decoded_together_in_batches():
    recorded = Recorded(two_prompts(), {})
    assert recorded.in_batches(1) is recorded
    together = recorded.in_batches(2).trace
    # Two prompt tokens and two decode steps of two rows, in two layers.
    assert np.unique(together.step).tolist() == [0, 1, 2, 3]
    assert np.diff(together.bounds).tolist() == [2] * 8
    assert together.request.tolist() == [0, 1] * 8
    assert together.ids_TK[:2].tolist() == [[0, 1], [0, 1]]
    assert Recorded(together, {}).in_batches(2).trace is together
    with pytest.raises(ConfigError, match="has 2 batches of 1 rows, the plan is for"):
        recorded.in_batches(3)
    with pytest.raises(ConfigError, match="has 1 batches of 2 rows"):
        Recorded(together, {}).in_batches(4)


def test_by_batch_is_the_mean_over_a_batchs_steps():
    recorded = Recorded(two_prompts(), {})
    assert recorded.by_batch(np.array([1.0, 3.0, 5.0, 6.0])).tolist() == [2.0, 5.5]
