"""Predicted seconds: by hand, and marginals against what toggling a block does."""

import dataclasses

import numpy as np
import pytest

from moe_edge.hardware.cost_model import CallSizes
from moe_edge.hardware.specs import Link
from moe_edge.place.call_costs import Batch, CallCosts
from moe_edge.place.latency_model import LatencyModel
from tests.place.support import cost_model, frequencies

ONE = 1 - 1e-9  # of a block that every token calls
PAIRS, STATES = CallSizes(pair=2, pair_row=3), CallSizes(state=2, token_row=3)


def costs(**changes):
    """Two servers: a call 1 s away takes 10 s, each token 2 s there and 3 s back."""
    fields = {
        "fixed_NM": np.array([[0, 10.0], [10.0, 0]]),
        "byte_NM": 1.0 - np.eye(2),
        "sizes": PAIRS,
        "local_N": np.array([1.0, 1.0]),
        "further_N": np.array([0.5, 0.5]),
        "gpus_N": np.array([1, 1]),
    }
    return CallCosts(**(fields | changes))


def always_first():
    """Two servers, one layer, two blocks: block 0 is called, block 1 is not."""
    return np.array([[[1.0, 0.0]], [[1.0, 0.0]]])


def model(batches, **changes):
    return LatencyModel(always_first(), costs(**changes), 1, batches)


def test_seconds_all_local_are_calls_one_after_another():
    on_NLE = np.ones((2, 1, 2), bool)
    assert model([Batch(1, 1)]).seconds(on_NLE) == pytest.approx(1.0)
    assert model([Batch(5, 1)]).seconds(on_NLE) == pytest.approx(1 + 4 * 0.5)
    both = model([Batch(5, 1), Batch(1, 7)])
    assert both.seconds(on_NLE) == pytest.approx(3 + 7)
    side_by_side = model([Batch(1, 1)], gpus_N=np.array([2, 2]))
    assert side_by_side.seconds(on_NLE) == pytest.approx(0.5)


def test_seconds_one_remote_block_by_hand():
    on_NLE = np.array([[[False, True]], [[True, True]]])
    single_N = model([Batch(1, 1)]).server_seconds(on_NLE)
    np.testing.assert_allclose(single_N, [10.0, 1.0], rtol=1e-6)
    # Four more tokens there and back; of 3 s of computing a fifth was counted.
    batch_N = model([Batch(5, 1)]).server_seconds(on_NLE)
    np.testing.assert_allclose(batch_N, [10 + 4 * 5 + 3 * 0.8, 3.0], rtol=1e-6)


def test_seconds_tokens_of_several_blocks_travel_once():
    """Both blocks that a token calls are on the other server."""
    frequency_NLE = np.full((2, 1, 2), 0.5)
    on_NLE = np.array([[[False, False]], [[True, True]]])
    seconds = {}
    for sizes in (STATES, PAIRS):
        known = LatencyModel(frequency_NLE, costs(sizes=sizes), 2, [Batch(5, 1)])
        seconds[bool(sizes.state)] = known.server_seconds(on_NLE)[0]
    # Computing: two blocks of 3 s, 3/5 s of that in the first call.
    assert seconds[True] == pytest.approx(10 + 4 * 5 + 6 - 0.6, rel=1e-6)
    assert seconds[False] == pytest.approx(10 + 9 * 5 + 6 - 0.6, rel=1e-6)
    # A block alone on one of four GPUs: each of its tokens once, not more often.
    known = LatencyModel(
        always_first(),
        costs(sizes=CallSizes(state=2), gpus_N=np.array([4, 4])),
        1,
        [Batch(5, 1)],
    )
    state = known.states(np.array([[[False, True]], [[True, True]]]))[0]
    assert state.there_NLM[0, 0, 1] == pytest.approx(10, rel=1e-6)


def test_seconds_chance_of_any_remote_call_counts():
    """One of two blocks, each called by half of the tokens, is away."""
    frequency_NLE = np.full((2, 1, 2), 0.5)
    on_NLE = np.array([[[False, True]], [[True, True]]])
    known = LatencyModel(frequency_NLE, costs(), 1, [Batch(1, 1)])
    held = 0.5 * 1.0
    expected = held + 0.5 * (10.0 - held)
    assert known.server_seconds(on_NLE)[0] == pytest.approx(expected)


def test_seconds_weigh_servers_by_requests_not_tokens():
    """Server 0 makes three of four calls with requests three times as long."""
    frequency_NLE = np.array([[[3.0, 0.0]], [[1.0, 0.0]]])
    known = LatencyModel(frequency_NLE, costs(), 1, [Batch((3.0, 1.0), 1)])
    np.testing.assert_allclose(known.weight_N, [0.5, 0.5])


def test_seconds_last_server_to_answer_decides():
    """Answers of two servers overlap; from one alone they would not."""
    three = CallCosts.of(cost_model(rate=1e4))
    three = dataclasses.replace(three, sizes=CallSizes(pair=16, pair_row=16))
    frequency_NLE = np.full((3, 1, 4), 0.25)
    known = LatencyModel(frequency_NLE, three, 2, [Batch(100, 1)])
    apart, together = np.ones((3, 1, 4), bool), np.ones((3, 1, 4), bool)
    apart[0], together[0] = False, False
    apart[1, 0, :2], apart[2, 0, 2:] = False, False
    together[2] = False
    assert known.server_seconds(apart)[0] < 0.8 * known.server_seconds(together)[0]
    known.blend = 1.0  # the sum of all does not see that
    np.testing.assert_allclose(
        known.server_seconds(apart)[0], known.server_seconds(together)[0], rtol=1e-3
    )


@pytest.mark.parametrize("sizes", [PAIRS, STATES], ids=["pairs", "states"])
@pytest.mark.parametrize("rate", [None, 0.01])
@pytest.mark.parametrize("tokens", [1, 40])
def test_marginals_match_toggling_with_one_other_server(tokens, rate, sizes):
    frequency_NLE = frequencies(2, 2, 8)
    rate_N = None if rate is None else np.full(2, rate)
    batches = [Batch(tokens, 1), Batch(1, 3)]
    known = LatencyModel(frequency_NLE, costs(sizes=sizes), 2, batches, rate_N)
    rng = np.random.default_rng(0)
    on_NLE = rng.random(frequency_NLE.shape) < 0.5
    on_NLE[1] |= ~on_NLE[0]
    own_NLE, others_NLE = known.marginals(on_NLE)
    assert not others_NLE.any()
    if rate is not None:  # the queue is linear in small steps only
        assert (own_NLE > 0).all()
        return
    before = known.seconds(on_NLE)
    for place in np.ndindex(on_NLE.shape):
        other = on_NLE.copy()
        other[place] = ~other[place]
        change = known.seconds(other) - before
        saved = change if on_NLE[place] else -change
        assert own_NLE[place] == pytest.approx(saved, rel=1e-6, abs=1e-9)


def test_marginals_of_a_hot_block_on_several_gpus_are_near_what_toggling_does():
    """Its tokens go to one GPU: not more states than tokens call it."""
    frequency_NLE = np.array([[[0.45, 0.05, 0.5]], [[0.2, 0.4, 0.4]]])
    given = costs(sizes=STATES, gpus_N=np.array([1, 4]))
    known = LatencyModel(frequency_NLE, given, 2, [Batch(40, 1)])
    on_NLE = np.array([[[True, True, False]], [[True, True, True]]])
    saved = known.marginals(on_NLE)[0][0, 0, 0]
    without = on_NLE.copy()
    without[0, 0, 0] = False
    change = known.seconds(without) - known.seconds(on_NLE)
    assert saved == pytest.approx(change, rel=0.2)


@pytest.mark.parametrize("blend", [0.0, 1.0])
def test_marginals_with_others_follow_toggling(blend):
    """A slow server: where its only copies go matters to the others."""
    slow = Link(bytes_per_s=2e5, latency_s=1e-3, source="test")
    links = {(n, m): slow for n in range(4) for m in range(4) if n != m and 3 in (n, m)}
    known = LatencyModel(
        frequencies(4, 2, 16),
        CallCosts.of(cost_model(gpus=((1.0,),) * 4, links=links)),
        3,
        [Batch(60, 1)],
    )
    known.blend = blend
    rng = np.random.default_rng(1)
    on_NLE = rng.random((4, 2, 16)) < 0.4
    on_NLE[3] |= ~on_NLE[:3].any(axis=0)
    own_NLE, others_NLE = known.marginals(on_NLE)
    assert others_NLE.any()
    before, guesses, changes = known.seconds(on_NLE), [], []
    for place in np.argwhere(~on_NLE):
        other = on_NLE.copy()
        other[tuple(place)] = True
        guesses.append((own_NLE + others_NLE)[tuple(place)])
        changes.append(before - known.seconds(other))
    assert np.corrcoef(guesses, changes)[0, 1] > 0.9


def test_owners_are_nearest_and_fall_back_to_the_nearest_at_all():
    known = LatencyModel(
        np.full((3, 1, 3), 1 / 3), CallCosts.of(cost_model()), 1, [Batch(1, 1)]
    )
    on_NLE = np.array(
        [[[True, False, True]], [[False, True, False]], [[True, True, False]]]
    )
    owner_NE = known.owners(on_NLE)[:, 0]
    assert owner_NE.tolist() == [[2, 1, 1], [2, 2, 0], [0, 1, 0]]


def test_rates_add_waiting():
    on_NLE = np.array([[[False, True]], [[True, True]]])
    idle = model([Batch(5, 1)])
    rate_N = np.full(2, 0.02)
    busy = LatencyModel(always_first(), costs(), 1, [Batch(5, 1)], rate_N)
    assert busy.seconds(on_NLE) > 1.1 * idle.seconds(on_NLE)
    rare = LatencyModel(always_first(), costs(), 1, [Batch(5, 1)], rate_N * 1e-6)
    assert rare.seconds(on_NLE) == pytest.approx(idle.seconds(on_NLE), rel=1e-4)
