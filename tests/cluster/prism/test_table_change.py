"""A change of the table, state by state, without servers."""

import numpy as np
import pytest

from moe_edge.cluster.prism.table_change import Phase, TableMachine
from moe_edge.place.rounds import Arrival


def machine() -> TableMachine:
    """Two servers, one layer, two blocks: each holds the block of its number."""
    return TableMachine(np.eye(2, dtype=bool)[:, None])


def test_a_move_passes_all_states_in_order():
    table = machine()
    assert table.phase is Phase.REST
    assert table.bring([Arrival(1, 0, 0, 0)], [(0, 0, 0)], at_s=2.0) == {
        1: [Arrival(1, 0, 0, 0)]
    }
    assert table.phase is Phase.COMING and table.unconfirmed == [1]
    assert not table.held_NLE[1, 0, 0]
    assert table.arrived(1, table.order, own=set())
    assert table.phase is Phase.COMING and table.moved == 1  # there, in no table yet
    table.publish([0, 1], table.take_drops())
    assert table.phase is Phase.OPEN and table.version == 1
    assert not table.confirmed(0, 0)  # another version
    assert not table.confirmed(0, 1) and table.confirmed(1, 1)
    assert table.in_force(5.0) == [(0, 0, 0)]
    assert table.phase is Phase.REST
    (change,) = table.changes
    assert (change.t_s, change.begun_s, change.version) == (5.0, 2.0, 1)
    assert change.moves == [(1, 0, 0)] and change.drops == [(0, 0, 0)]
    assert table.held_NLE.tolist() == [[[False, False]], [[True, True]]]


def test_a_block_that_came_from_its_own_checkpoint_says_so():
    table = machine()
    table.bring([Arrival(1, 0, 0, 0)], [], at_s=0.0)
    table.arrived(1, table.order, own={(0, 0)})
    table.publish([0, 1])
    table.waited_for.clear()
    table.in_force(1.0)
    assert table.changes[0].sources == [1]


def test_what_was_about_to_leave_stays_when_a_server_is_lost():
    table = machine()
    table.bring([Arrival(1, 0, 0, 0)], [(0, 0, 0)], at_s=0.0)
    table.arrived(1, table.order, own=set())
    table.publish([0, 1], table.take_drops())
    table.lost(1)
    assert table.held_NLE.tolist() == [[[True, False]], [[False, False]]]
    table.publish([0])
    assert table.confirmed(0, 2) and table.in_force(1.0) == []
    assert [change.drops for change in table.changes] == [[], [(1, 0, 0), (1, 0, 1)]]


def test_a_change_waits_for_the_one_before_it():
    table = machine()
    table.bring([Arrival(1, 0, 0, 0)], [], at_s=0.0)
    with pytest.raises(RuntimeError, match=r"servers \[1\] have still to bring"):
        table.bring([Arrival(0, 0, 1, 1)], [], at_s=0.0)


def test_nothing_is_dropped_before_all_have_confirmed():
    table = machine()
    table.publish([0, 1])
    with pytest.raises(RuntimeError, match=r"servers \[0, 1\] .* version 1; nothing"):
        table.in_force(0.0)
