"""Whom a server asks for a block."""

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.place.call_targets import call_targets

# Four servers, one layer of four blocks: block 0 everywhere, 1 on server 2 alone, 2 on
# servers 0 and 3, 3 on servers 1 and 2.
HELD = np.array([[[1, 0, 1, 0]], [[1, 0, 0, 1]], [[1, 1, 0, 1]], [[1, 0, 1, 0]]], bool)


def test_ties_go_to_the_next_holder_in_the_ring():
    expected = [[0, 2, 0, 1], [1, 2, 3, 1], [2, 2, 3, 2], [3, 2, 3, 1]]
    assert call_targets(HELD)[:, 0].tolist() == expected
    alike = np.full((4, 4), 0.5)
    assert call_targets(HELD, alike)[:, 0].tolist() == expected


def test_the_holder_that_answers_first_is_asked_and_an_own_copy_before_it():
    seconds_NM = np.array(
        [[9, 4, 3, 1], [1, 9, 1, 2], [1, 1, 9, 0], [1, 4, 3, 9]], float
    )
    targets = call_targets(HELD, seconds_NM)
    assert targets.dtype == np.int16
    assert targets[:, 0].tolist() == [
        [0, 2, 0, 2],
        [1, 2, 0, 1],
        [2, 2, 3, 2],
        [3, 2, 3, 2],
    ]


def test_targets_hold_what_they_are_asked_for():
    rng = np.random.default_rng(0)
    for _ in range(50):
        N, L, E = rng.integers(1, 6, 3)
        held_NLE = rng.random((N, L, E)) < 0.4
        held_NLE[rng.integers(N)] |= ~held_NLE.any(axis=0)
        seconds_NM = rng.integers(0, 3, (N, N)).astype(float)
        targets_NLE = call_targets(held_NLE, seconds_NM)
        chosen_NLE = np.take_along_axis(held_NLE, targets_NLE.astype(int), axis=0)
        assert chosen_NLE.all()
        own_NLE = targets_NLE == np.arange(N)[:, None, None]
        assert (own_NLE == held_NLE).all()


def test_blocks_without_a_holder_and_other_sizes_are_refused():
    lost = HELD.copy()
    lost[2, 0, 1] = False
    with pytest.raises(CapacityError, match="1 blocks are on no server, the first is "):
        call_targets(lost)
    with pytest.raises(ConfigError, match=r"seconds_NM has shape \(3, 3\), expected"):
        call_targets(HELD, np.zeros((3, 3)))


def test_a_block_that_nobody_holds_may_be_named():
    lost = HELD.copy()
    lost[2, 0, 1] = False
    assert call_targets(lost, nobody=-1)[:, 0].tolist() == [
        [0, -1, 0, 1],
        [1, -1, 3, 1],
        [2, -1, 3, 2],
        [3, -1, 3, 1],
    ]
