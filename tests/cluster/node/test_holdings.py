import numpy as np
import pytest

from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.holdings import BlockReader, Holdings
from moe_edge.cluster.node.tables import Tables
from moe_edge.cluster.transport.base import Call
from moe_edge.core.checks import CapacityError
from tests.support.layered import StoreReader
from tests.support.tiny_models import ALL, BF16
from tests.support.tiny_servers import programs_of

CONFIG = ALL["gqa"]
SHAPE = CONFIG.num_layers, CONFIG.moe.num_experts
SLOTS = 3


@pytest.fixture
def holdings():
    return Holdings(SLOTS, SHAPE, BlockReader(StoreReader(CONFIG, dtype=BF16)))


def put(holdings, *cells):
    for cell in cells:
        holdings.put(*cell, holdings.blocks.read(*cell))


def test_blocks_take_slots_until_there_are_none(holdings):
    put(holdings, (1, 0), (1, 0), (2, 5), (1, 7))
    assert holdings.free == 0 and holdings.most_used == SLOTS
    with pytest.raises(CapacityError, match="block 8 of layer 1 finds all 3 slots"):
        put(holdings, (1, 8))
    holdings.drop([(2, 5), (2, 5)])
    assert holdings.free == 1 and not holdings.held_LE[2, 5]
    put(holdings, (1, 8))
    np.testing.assert_array_equal(holdings.record(1, 8), holdings.blocks.read(1, 8))
    assert holdings.record(2, 5) is None


def test_fill_holds_what_is_asked_for_and_no_more(holdings):
    put(holdings, (1, 0), (2, 5))
    held_LE = np.zeros(SHAPE, bool)
    held_LE[2, 3:6] = True
    holdings.fill(held_LE)
    np.testing.assert_array_equal(holdings.held_LE, held_LE)
    held_LE[1, 0] = True
    with pytest.raises(CapacityError, match="4 blocks for 3 slots"):
        holdings.fill(held_LE)


def test_a_lent_slot_shows_in_no_table(holdings):
    put(holdings, (1, 0))
    slots = [holdings.lend(holdings.blocks.read(1, block)) for block in (3, 4)]
    assert holdings.free == 0 and holdings.lend(holdings.blocks.read(1, 5)) is None
    assert holdings.held_LE.sum() == 1 and holdings.most_used == SLOTS
    target_LE = np.zeros(SHAPE, np.int16)
    tables = Tables(0, holdings)
    tables.begin(0, target_LE)
    assert (tables.view.slot_LE != holdings.nowhere).sum() == 1
    for slot in slots:
        holdings.give_back(slot)
    assert holdings.free == 2


def test_a_block_that_leaves_soon_is_not_here_for_its_own_server(holdings):
    """Its slot is another block's once all have confirmed this table."""
    put(holdings, (1, 0), (1, 1))
    target_LE, read_LE = np.zeros(SHAPE, np.int16), np.zeros(SHAPE, bool)
    read_LE[1, 0] = True
    tables = Tables(0, holdings)
    tables.begin(0, target_LE, read_LE)
    assert tables.view.slot_LE[1, 0] == holdings.nowhere
    assert tables.view.asked_LE[1, 0] == 0  # reads it for each call
    assert tables.view.slot_LE[1, 1] == holdings.slot_LE[1, 1]


def test_without_a_free_slot_a_block_that_is_away_is_not_here(holdings):
    put(holdings, (1, 0), (1, 1), (1, 2))
    answers = Answers(programs_of("gqa", BF16), holdings)
    call = Call(
        layer=1,
        bucket=1,
        version=0,
        x_TD=np.ones((1, CONFIG.d_model), np.float32),
        token_P=np.zeros(2, np.uint16),
        block_P=np.array([0, 7], np.uint16),
    )
    assert answers.compute(call) is None
    assert answers.compute(call, on_demand=True) is None
    holdings.drop([(1, 2)])
    rows = answers.compute(call, on_demand=True)
    assert rows.shape == (2, CONFIG.d_model) and holdings.free == 1
    put(holdings, (1, 7))
    np.testing.assert_array_equal(answers.compute(call), rows)


def test_a_server_without_slots_holds_nothing():
    blocks = BlockReader(StoreReader(CONFIG, dtype=BF16))
    holdings = Holdings(0, SHAPE, blocks)
    assert holdings.lend(blocks.read(1, 0)) is None
    with pytest.raises(CapacityError, match="finds all 0 slots taken"):
        put(holdings, (1, 0))
