"""Notes of a server: the same whether they were packed once or often."""

import numpy as np
import pytest

from moe_edge.cluster.node import ledger as ledger_module
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.tables import View

L, E, K = 2, 5, 2


def view_of(version, target_LE):
    target_LE = np.pad(np.array(target_LE, np.int16), ((0, 0), (0, 1)))
    return View(version, target_LE, target_LE, target_LE, np.zeros(L, bool))


def fill(ledger):
    """A prompt of three tokens in a bucket of four, then two decode steps."""
    first = view_of(0, [[0, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
    second = view_of(1, [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    ids_TK = np.array([[0, 1], [1, 3], [1, 0], [E, E]], np.int32)
    ledger.token(7, is_decode=False)
    ledger.chunk()
    for layer in range(L):
        ledger.looked_up(layer, ids_TK, np.ones((4, K), np.float32), first)
    for view in (first, second):
        ledger.token(7, is_decode=True)
        ledger.chunk()
        for layer in range(L):
            ids_1K = np.array([[3, 4]], np.int32)
            ledger.looked_up(layer, ids_1K, np.ones((1, K), np.float32), view)


@pytest.mark.parametrize("pack", [1, 2, 2048])
def test_counts_and_rows_by_hand(monkeypatch, pack):
    monkeypatch.setattr(ledger_module, "PACK", pack)
    ledger = Ledger(0, 2, (L, E))
    fill(ledger)
    counts = ledger.counts()
    np.testing.assert_array_equal(counts["pairs_LE"], [[2, 3, 0, 3, 2]] * 2)
    np.testing.assert_array_equal(counts["calls_LE"], [[1, 1, 0, 3, 2]] * 2)
    assert ledger.pairs == 20
    # Layer 0: blocks 0 and 4 are here, from version 1 on all; layer 1: none.
    assert ledger.local_pairs == 2 + 1 + 2
    assert ledger.remote_blocks == (2 + 1) + (3 + 2 + 2)
    rows = ledger.lookups()
    np.testing.assert_array_equal(rows["step"], [0, 1, 2, 0, 1, 2, 3, 3, 4, 4])
    np.testing.assert_array_equal(rows["layer"], [0, 0, 0, 1, 1, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(rows["phase"], [0] * 6 + [1] * 4)
    np.testing.assert_array_equal(rows["version"], [0] * 8 + [1] * 2)
    np.testing.assert_array_equal(rows["ids_TK"][:3], [[0, 1], [1, 3], [1, 0]])
    np.testing.assert_array_equal(rows["holder_TK"][:3], [[0, 1], [1, 1], [1, 0]])
    assert set(rows["request"]) == {7}


def test_packing_keeps_nothing_that_was_appended():
    ledger = Ledger(0, 2, (L, E))
    fill(ledger)
    ledger.counts()
    assert not ledger._lookups


def test_ledger_without_lookups_has_empty_rows():
    rows = Ledger(0, 1, (L, E)).lookups()
    assert all(len(column) == 0 for column in rows.values())
