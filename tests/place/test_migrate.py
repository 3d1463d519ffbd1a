"""Whether to migrate, in seconds; settling."""

import numpy as np
import pytest

from moe_edge.hardware.specs import Link
from moe_edge.place.migrate import (
    arrivals,
    decide,
    migration_seconds,
    ordered_moves,
    remote_call_seconds,
    remote_seconds,
    settle,
)
from moe_edge.place.plan import Placement
from tests.place.support import cost_model

# One layer, three blocks, two servers of one GPU.
BEFORE = Placement(np.array([[[0, 0, -1]], [[-1, 0, 0]]]))
AFTER = Placement(np.array([[[0, -1, 0]], [[-1, 0, 0]]]))
TWO = {"gpus": ((1.0,), (1.0,))}


def random_placement(seed, slots, shape=(1, 4, 10)):
    rng = np.random.default_rng(seed)
    gpu_NLE = np.full(shape, -1, np.int8)
    for gpu_LE, slots_G in zip(gpu_NLE, slots, strict=True):
        blocks = rng.permutation(gpu_LE.size)[: slots_G.sum()]
        gpu_LE.flat[blocks] = np.repeat(np.arange(len(slots_G)), slots_G)
    return Placement(gpu_NLE)


def test_arrivals_counts_what_comes_and_not_what_goes():
    assert arrivals(BEFORE, AFTER).tolist() == [[0, 0, 0, 2]]
    assert arrivals(BEFORE, BEFORE).tolist() == []


def test_arrivals_between_gpus_of_a_server_counts():
    moved = Placement(np.array([[[1, 0, -1]], [[-1, 0, 0]]]))
    assert arrivals(BEFORE, moved).tolist() == [[0, 1, 0, 0]]


def test_migration_seconds_is_bytes_over_the_gpu_link():
    model = cost_model(**TWO)  # blocks of 3 * 8 * 4 * 2 = 192 bytes, 1e9 bytes/s
    moves_X4 = np.array([[0, 0, 0, 2], [1, 0, 3, 1], [1, 0, 3, 2]])
    assert migration_seconds(moves_X4, model, BEFORE) == pytest.approx(3 * 192e-9)
    assert migration_seconds(moves_X4[:0], model, BEFORE) == 0.0


def test_migration_seconds_over_the_network_count_the_line_of_the_fastest_holder():
    slow = Link(bytes_per_s=1e3, latency_s=1e-3, source="test")
    model = cost_model(links={(0, 2): slow})  # others 1e6 bytes/s, 1e-3 s
    current = Placement(np.array([[[0, 0, 0]], [[-1, 0, -1]], [[-1, -1, 0]]]))
    moves_X4 = np.array([[2, 0, 0, 0], [2, 0, 0, 1]])  # from 0 alone; from 0 or 1
    over_s = (1e-3 + 192e-3) + (1e-3 + 192e-6) + 2 * 192e-9
    found = migration_seconds(moves_X4, model, current, "network")
    assert found == pytest.approx(over_s)
    here = np.array([[2, 0, 0, 2]])  # from another GPU of the server: host memory
    assert migration_seconds(here, model, current, "network") == pytest.approx(192e-9)


def test_remote_seconds_each_call_goes_to_the_nearest_copy():
    gpu_NLE = np.array([[[0, -1]], [[-1, 0]], [[-1, 0]]])
    calls_NLE = np.array([[[5.0, 2.0]], [[3.0, 9.0]], [[1.0, 9.0]]])
    remote_s_NM = np.array([[0, 4.0, 0.5], [2.0, 0, 1.0], [3.0, 1.0, 0]])
    seconds = remote_seconds(Placement(gpu_NLE), calls_NLE, remote_s_NM)
    assert seconds == pytest.approx(2 * 0.5 + 3 * 2.0 + 1 * 3.0)


def test_remote_call_seconds_takes_the_fastest_gpu_and_both_ways():
    model = cost_model(gpus=((1.0,), (1.0, 4.0)))
    seconds_NM = remote_call_seconds(model, tokens=10)
    assert (np.diag(seconds_NM) == 0).all()
    ways_s = 2 * (1e-3 + 10 * 16 / 1e6)
    compute_s = model.compute_s(1, 1, 10)
    assert compute_s < model.compute_s(1, 0, 10)
    assert seconds_NM[0, 1] == pytest.approx(ways_s + compute_s)


def cost_of(before_s, after_s):
    return lambda placement: before_s if placement is BEFORE else after_s


def test_decide_compares_seconds_with_seconds():
    model = cost_model(**TWO)  # the block that comes takes 192e-9 s
    gain = decide(BEFORE, AFTER, cost_of(1e-6, 0.8e-6), model, hysteresis=0.0)
    assert gain.adopt
    assert gain.moves == 1
    assert gain.migration_s == pytest.approx(192e-9)
    loss = decide(BEFORE, AFTER, cost_of(1e-6, 0.81e-6), model, hysteresis=0.0)
    assert not loss.adopt


def test_decide_hysteresis_asks_for_more():
    model = cost_model(**TWO)
    cost_s = cost_of(100.0, 94.0)
    assert decide(BEFORE, AFTER, cost_s, model, hysteresis=0.05).adopt
    assert not decide(BEFORE, AFTER, cost_s, model, hysteresis=0.07).adopt


def test_decide_same_placement_is_never_adopted():
    model = cost_model(**TWO)
    assert not decide(BEFORE, BEFORE, cost_of(9.0, 9.0), model, hysteresis=0).adopt


@pytest.mark.parametrize("seed", range(4))
def test_settle_moves_only_blocks_new_to_their_server(seed):
    slots = [np.array([6, 9, 3]), np.array([20])]
    current = random_placement(seed, slots, (2, 4, 10))
    candidate = random_placement(seed + 50, slots, (2, 4, 10))
    settled = settle(current, candidate, slots)
    assert (settled.on_NLE == candidate.on_NLE).all()
    new = (candidate.on_NLE & ~current.on_NLE).sum()
    assert len(arrivals(current, settled)) == new
    used_G = np.bincount(settled.gpu_NLE[0].ravel() + 1)[1:]
    assert (used_G <= slots[0]).all()


def test_settle_keeps_a_layer_spread_over_the_gpus():
    """Blocks 0 and 2 leave GPU 0; wherever the candidate put 4 and 5, they go there."""
    slots = [np.array([4, 4])]
    current = Placement(np.array([[[0, 1, 0, 1, -1, -1]]]))
    candidate = Placement(np.array([[[-1, 0, -1, 0, 1, 1]]]))
    settled = settle(current, candidate, slots)
    assert settled.gpu_NLE.tolist() == [[[-1, 1, -1, 1, 0, 0]]]


def test_settle_tie_takes_the_candidates_gpu_and_a_full_one_never():
    current = Placement(np.array([[[0, 1, -1], [0, -1, -1]]]))
    candidate = Placement(np.array([[[0, 1, 1], [0, -1, -1]]]))
    settled = settle(current, candidate, [np.array([3, 3])])
    assert settled.gpu_NLE[0, 0].tolist() == [0, 1, 1]
    settled = settle(current, candidate, [np.array([3, 1])])
    assert settled.gpu_NLE[0, 0].tolist() == [0, 1, 0]


# Servers 0 and 1 hold everything or something; server 2 gets blocks 0, 1, 2.
HELD = Placement(np.array([[[0, 0, 0, 0]], [[0, -1, -1, -1]], [[-1, -1, -1, 0]]]))
NEW = Placement(np.array([[[0, 0, 0, 0]], [[0, -1, -1, -1]], [[0, 0, 0, -1]]]))
CALLS = np.array([[[1.0] * 4], [[1.0] * 4], [[5.0, 9.0, 7.0, 1.0]]])


def ways(model, source):
    return [(m.block, m.source) for m in ordered_moves(HELD, NEW, model, CALLS, source)]


def test_ordered_moves_most_called_first_each_by_the_link_that_is_free_first():
    assert ways(cost_model(), "host") == [(1, 2), (2, 2), (0, 2)]
    # Blocks 1 and 2 only come from server 0; block 0 from idle server 1.
    assert ways(cost_model(), "network") == [(1, 0), (2, 0), (0, 1)]
    slow = Link(bytes_per_s=1e3, latency_s=1e-3, source="test")
    model = cost_model(links={(1, 2): slow})
    assert ways(model, "network") == [(1, 0), (2, 0), (0, 0)]


@pytest.mark.parametrize("sharing", ["egress", "pair"])
def test_ordered_moves_come_from_holders_in_turn(sharing):
    rng = np.random.default_rng(0)
    held = rng.random((3, 4, 12)) < 0.5
    held[0] = True
    current = Placement(np.where(held, 0, -1))
    candidate = Placement(np.zeros((3, 4, 12), np.int8))
    model = cost_model(sharing=sharing)
    moves = ordered_moves(current, candidate, model, rng.random(held.shape), "network")
    assert len(moves) == (~held).sum()
    assert all(held[m.source, m.layer, m.block] for m in moves)
    # The two that hold some blocks both send.
    count = np.bincount([m.source for m in moves], minlength=3)
    assert (count[1:] > 0).all()
