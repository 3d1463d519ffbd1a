"""EPLB against its published example, and the heterogeneous variant."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.place.eplb import (
    Eplb,
    EplbHeterogeneous,
    balanced_pack,
    pack_unequal,
    rebalance,
    replicate,
)
from tests.place.support import cost_model, frequencies

LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
HIERARCHICAL = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
GLOBAL = [
    [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
    [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
]


@pytest.mark.parametrize("groups, slots", [(4, HIERARCHICAL), (3, GLOBAL)])
def test_rebalance_matches_the_golden(groups, slots):
    assert rebalance(LOADS, 16, groups, 2, 8).tolist() == slots


def test_rebalance_tied_loads_are_spread_evenly():
    block_LR = rebalance(np.ones((1, 8)), 16, 1, 1, 8)
    assert sorted(block_LR[0].tolist()) == sorted(list(range(8)) * 2)


@pytest.mark.parametrize(
    "numbers, message",
    [
        ((15, 4, 2, 8), "GPUs must divide replicas, got 8 and 15"),
        ((16, 5, 5, 8), "groups must divide blocks, got 5 and 12"),
        ((16, 3, 3, 8), "nodes must divide GPUs, got 3 and 8"),
        ((8, 4, 2, 8), "8 replicas for 12 blocks"),
    ],
)
def test_rebalance_numbers_that_do_not_divide_are_refused(numbers, message):
    with pytest.raises(ConfigError, match=message):
        rebalance(LOADS, *numbers)


def test_balanced_pack_one_item_a_bin_keeps_the_order():
    assert balanced_pack(np.array([1.0, 9.0, 5.0]), 3).tolist() == [[0], [1], [2]]


def test_replicate_copies_the_heaviest_first_of_equals():
    item_R, copies_X = replicate(np.array([4.0, 4.0, 1.0]), 5)
    assert item_R.tolist() == [0, 1, 2, 0, 1]
    assert copies_X.tolist() == [2, 2, 1]
    _, copies_X = replicate(np.array([90.0, 4.0, 1.0]), 6, most=2)
    assert copies_X.tolist() == [2, 2, 2]


def test_eplb_places_the_golden_layer():
    """Loads as the frequencies of two equal servers with four GPUs each."""
    frequency_NLE = np.stack([LOADS / 2, LOADS / 2])
    slots = [np.full(4, 4), np.full(4, 4)]
    placement = Eplb(groups=4).place(frequency_NLE, slots)
    for layer, row in enumerate(HIERARCHICAL):
        for slot, block in enumerate(row):
            server, gpu = divmod(slot // 2, 4)
            held = placement.gpu_NLE[server, layer, block]
            assert 0 <= held <= gpu  # two copies on a server: the first GPU's
    assert (placement.copies_LE > 0).all()


@pytest.mark.parametrize(
    "slots, message",
    [
        ([np.array([40]), np.array([41])], r"slots are \[\[40\], \[41\]\]"),
        ([np.array([40]), np.array([40, 40])], "eplb needs equal servers"),
        ([np.array([23]), np.array([23])], "every GPU 5 slots of each of 4 layers: 10"),
    ],
)
def test_eplb_unequal_or_tight_servers_are_refused(slots, message):
    with pytest.raises(ConfigError, match=message):
        Eplb().place(frequencies(2, 4, 11), slots)


def test_pack_unequal_load_follows_slots_and_speed():
    load_E = np.array([8.0, 4.0, 2.0, 2.0])
    server_D = np.array([0, 1])
    equal = pack_unequal(load_E, np.array([2, 2]), np.ones(2), server_D)
    assert equal.tolist() == [[True, False, False, True], [False, True, True, False]]
    fast = pack_unequal(load_E, np.array([2, 2]), np.array([1.0, 9.0]), server_D)
    assert fast.tolist() == [[False, False, True, True], [True, True, False, False]]


def test_pack_unequal_no_block_twice_on_a_server_and_no_slot_lost():
    on_DE = pack_unequal(
        np.array([90.0, 1.0, 1.0]),
        np.array([2, 1, 1]),
        np.ones(3),
        np.array([0, 1, 1]),
    )
    assert on_DE.any(axis=0).all()
    assert (on_DE[1:].sum(axis=0) <= 1).all()
    assert on_DE.sum() == 4


def test_eplb_heterogeneous_copies_the_most_called_blocks():
    frequency_NLE = frequencies(3, 4, 16, shared=1.0)
    slots = [np.array([20]), np.array([30]), np.array([40, 20])]
    model = cost_model(gpus=((1.0,), (2.0,), (1.0, 1.0)))
    placement = EplbHeterogeneous().place(frequency_NLE, slots, model)
    load_LE = frequency_NLE.sum(axis=0)
    for load_E, copies_E in zip(load_LE, placement.copies_LE, strict=True):
        assert copies_E[load_E.argmax()] == 3
        assert copies_E[load_E.argmin()] == 1
    assert placement.memory_use(slots) == 1.0
