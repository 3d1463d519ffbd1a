"""Versions of a server's table of targets."""

import numpy as np

from moe_edge.cluster.node.tables import HERE, Tables


class Held:
    """What `view_of` reads of `Holdings`: block 0 in slot 1, of two slots."""

    nowhere = 2
    slot_LE = np.array([[1, 2]], np.int32)
    held_LE = slot_LE != nowhere


def table(*targets):
    return np.array([targets], np.int16)


def test_older_tables_are_ignored_within_a_run():
    tables = Tables(0, Held())
    tables.begin(0, table(0, 1))
    tables.offer(2, table(0, 2))
    tables.offer(1, table(0, 3))
    assert tables.install() == 2 and tables.install() is None
    assert tables.view.asked_LE.tolist() == [[HERE, 2, HERE]]


def test_a_run_begins_with_its_own_table_whatever_came_before():
    tables = Tables(0, Held())
    tables.begin(0, table(0, 1))
    tables.offer(5, table(0, 2))
    tables.install()
    tables.offer(6, table(0, 2))  # came too late for the last run
    tables.begin(0, table(0, 3))
    assert tables.view.version == 0
    assert tables.view.target_LE[:, :2].tolist() == [[0, 3]]
    assert tables.newer(0, deadline_s=0.0) is None
