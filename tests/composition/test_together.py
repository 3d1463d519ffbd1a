"""Sub-experts, a lossy route and a K a row on one offloaded engine."""

import numpy as np
import pytest

from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.slots import RowSlots
from tests.support.refactored import parent_folder, write_random
from tests.support.running import SIZES, row, run, tokens_of

pytestmark = pytest.mark.slow

LENGTHS = {1: 9, 2: 17, 4: 5}  # by K: of prompts
ROWS = [row(k, size, 8, k=k) for k, size in LENGTHS.items()]
ARRIVALS = [*zip((0, 0, 2), ROWS, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    work = tmp_path_factory.mktemp("together")
    return write_random(parent_folder(work / "p", "qwen3_moe"), work / "r", "linear")


@pytest.fixture(scope="module")
def alone(folder):
    """What each row gets by itself, resident, at its K."""
    engine = load_engine(folder, with_tokenizer=False).engine
    return {
        each.id: tokens_of(run(RowSlots(engine.at_k(each.k), **SIZES), [(0, each)]))
        for each in ROWS
    }


def offloaded(folder, bonus: float):
    """Half of the blocks, over a link on which neighbours travel together."""
    options = OffloadOptions(
        device_memory="50%",
        mode="layered",
        slot_plan="equal",
        route="prefer",
        route_options={"bonus": bonus},
        link_bytes_per_s=1e9,
    )
    return load_engine(folder, offload=options, with_tokenizer=False).engine


def test_a_route_that_is_off_gives_each_row_the_tokens_of_its_k(folder, alone):
    with offloaded(folder, bonus=0.0) as engine:
        found = tokens_of(run(RowSlots(engine, **SIZES), ARRIVALS))
    assert found == {id: tokens[id] for id, tokens in alone.items()}


def test_rows_at_their_floor_keep_their_first_block_and_others_give_way(folder, alone):
    """A row that computes one block a layer keeps it; of the others' some are replaced,
    and the blocks of a parent, which stand beside each other, share a transfer."""
    with offloaded(folder, bonus=2.0) as engine:
        found = tokens_of(run(RowSlots(engine, **SIZES), ARRIVALS))
        moved, stats = engine.moved(), engine.queue.stats()
    assert found[1] == alone[1][1]
    assert 0 < moved.substituted < moved.routed
    assert stats.merged > 0
    assert not engine.lossless and np.all([len(found[k]) == 8 for k in LENGTHS])
