"""Uniform, Redundance, SmartMoE."""

import numpy as np
import pytest

from moe_edge.place.baselines import (
    Redundance,
    SmartMoe,
    Uniform,
    balance,
    layer_slots,
)
from moe_edge.place.pack import share_out
from moe_edge.place.plan import Placement
from tests.place.support import frequencies

SLOTS = [np.array([30]), np.array([30]), np.array([30, 30])]


def equal_shares(total, limit_D):
    return share_out(total, np.ones(len(limit_D)), limit_D)


def test_equal_shares_are_equal_where_limits_allow():
    assert equal_shares(10, np.array([9, 9, 9])).tolist() == [4, 3, 3]
    assert equal_shares(10, np.array([1, 9, 9])).tolist() == [1, 5, 4]
    assert equal_shares(10, np.array([1, 2, 7])).tolist() == [1, 2, 7]


@pytest.mark.parametrize("seed", range(5))
def test_layer_slots_totals_differ_by_at_most_one(seed):
    quota_D = np.random.default_rng(seed).integers(0, 40, 5)
    slots_LD = layer_slots(quota_D, 7)
    assert (slots_LD.sum(axis=0) == quota_D).all()
    assert np.ptp(slots_LD.sum(axis=1)) <= 1
    assert (np.ptp(slots_LD, axis=0) <= 1).all()


def test_uniform_gives_each_gpu_the_same_number_of_every_layer():
    placement = Uniform().place(frequencies(3, 4, 16), SLOTS, seed=3)
    assert (placement.copies_LE == 1).all()
    used = [
        (placement.gpu_NLE[n] == g).sum(axis=1).tolist()
        for n, g in ((0, 0), (1, 0), (2, 0), (2, 1))
    ]
    assert used == [[4] * 4] * 4
    again = Uniform().place(frequencies(3, 4, 16), SLOTS, seed=3)
    other = Uniform().place(frequencies(3, 4, 16), SLOTS, seed=4)
    assert (again.gpu_NLE == placement.gpu_NLE).all()
    assert (other.gpu_NLE != placement.gpu_NLE).any()


def test_redundance_fills_every_gpu():
    placement = Redundance().place(frequencies(3, 4, 16), SLOTS)
    assert placement.memory_use(SLOTS) == 1.0


def test_redundance_server_larger_than_the_model_holds_it_once():
    slots = [np.array([100, 100]), np.array([5])]
    placement = Redundance().place(frequencies(2, 4, 16), slots)
    assert placement.on_NLE[0].all()
    assert placement.on_NLE[1].sum() == 5


def test_balance_heaviest_first_to_the_idlest():
    load_E = np.array([9.0, 8.0, 2.0, 1.0])
    assert balance(load_E, np.array([2, 2])).tolist() == [0, 1, 1, 0]
    assert balance(load_E, np.array([1, 3])).tolist() == [0, 1, 1, 1]


def test_balance_tie_keeps_the_gpu_else_takes_the_first():
    load_E = np.array([5.0, 5.0, 1.0, 1.0])
    assert balance(load_E, np.array([2, 2])).tolist() == [0, 1, 0, 1]
    now_E = np.array([1, 1, 0, 0])  # unbalanced: 10 against 2
    assert balance(load_E, np.array([2, 2]), now_E).tolist() == [1, 0, 0, 1]


def test_balance_without_a_lower_maximum_stays():
    load_E = np.array([5.0, 5.0, 1.0, 1.0])
    now_E = np.array([1, 0, 1, 0])
    assert balance(load_E, np.array([2, 2]), now_E).tolist() == now_E.tolist()


def test_smartmoe_stays_with_a_balanced_current_placement():
    frequency_NLE = frequencies(3, 4, 16)
    first = SmartMoe().place(frequency_NLE, SLOTS)
    assert (first.copies_LE == 1).all()
    noisy = frequency_NLE * (1 + 1e-9 * np.arange(16))
    again = SmartMoe().place(noisy, SLOTS, current=first)
    assert (again.gpu_NLE == first.gpu_NLE).all()


def test_smartmoe_still_knows_where_blocks_are_after_a_settle():
    """Settling shares a server's blocks over its GPUs otherwise than equally."""
    frequency_NLE = frequencies(3, 4, 16)
    gpu_NLE = SmartMoe().place(frequency_NLE, SLOTS).gpu_NLE.copy()
    block = np.flatnonzero(gpu_NLE[2, 1] == 1)[0]
    gpu_NLE[2, 1, block] = 0
    settled = Placement(gpu_NLE)
    settled.check(SLOTS)
    same = SmartMoe().place(frequency_NLE, SLOTS, current=settled).gpu_NLE
    assert (same[:, [0, 2, 3]] == gpu_NLE[:, [0, 2, 3]]).all()
    others = frequencies(3, 4, 16, seed=1)
    again_NLE = SmartMoe().place(others, SLOTS, current=settled).gpu_NLE
    assert (again_NLE != gpu_NLE).any()
    for layer in range(4):
        now, then = ((gpu[2, layer] == 0).sum() for gpu in (gpu_NLE, again_NLE))
        assert now == then


def test_smartmoe_balances_anew_after_a_placement_with_copies():
    frequency_NLE = frequencies(3, 4, 16)
    copied = Redundance().place(frequency_NLE, SLOTS)
    fresh = SmartMoe().place(frequency_NLE, SLOTS)
    after = SmartMoe().place(frequency_NLE, SLOTS, current=copied)
    assert isinstance(after, Placement)
    assert (after.gpu_NLE == fresh.gpu_NLE).all()
