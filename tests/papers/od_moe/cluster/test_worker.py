"""A worker alone: what it loads and when, what it keeps, and the rows it returns."""

import functools

import numpy as np
import pytest

from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.holdings import BlockReader, Holdings
from moe_edge.cluster.transport.base import Call
from moe_edge.core.checks import RequestError
from moe_edge.papers.od_moe.cluster import worker as workers
from moe_edge.papers.od_moe.cluster import worker_slots
from moe_edge.papers.od_moe.cluster.worker import ATTEMPTS, Worker
from tests.support.layered import StoreReader
from tests.support.tiny_models import ALL, BF16
from tests.support.tiny_servers import programs_of

NAME, DTYPE, LAYER, OTHER = "gqa", BF16, 1, 2
CONFIG = ALL[NAME]
E, K = CONFIG.moe.num_experts, CONFIG.moe.top_k
BLOCK_S = 0.125  # sums of it are exact


@functools.cache
def resident() -> Answers:
    """Answers from all blocks."""
    shape = CONFIG.num_layers, E
    reader = StoreReader(CONFIG, dtype=DTYPE)
    holdings = Holdings(2 * E, shape, BlockReader(reader))
    held_LE = np.zeros(shape, bool)
    held_LE[[LAYER, OTHER]] = True
    holdings.fill(held_LE)
    return Answers(programs_of(NAME, DTYPE), holdings)


@pytest.fixture
def make():
    def worker(slots: int = 3) -> Worker:
        return Worker(StoreReader(CONFIG, dtype=DTYPE), programs_of(NAME, DTYPE), slots)

    return worker


def decode(count: int, blocks, layer: int = LAYER) -> Call:
    """One token asks for blocks."""
    x_TD = np.random.default_rng(count).standard_normal((1, CONFIG.d_model), np.float32)
    token_P = np.zeros(len(blocks), np.uint16)
    return Call(layer, 1, count * ATTEMPTS, x_TD, token_P, np.array(blocks, np.uint16))


def prompt(tokens: int, seed: int = 0) -> Call:
    """Tokens of a prompt with random blocks, in order of block and token."""
    rng = np.random.default_rng(seed)
    ids_TK = np.stack([rng.permutation(E)[:K] for _ in range(tokens)])
    block_P = ids_TK.reshape(-1)
    order_P = block_P.argsort(kind="stable")
    x_TD = rng.standard_normal((tokens, CONFIG.d_model), np.float32)
    token_P = (order_P // K).astype(np.uint16)
    return Call(LAYER, 16, 0, x_TD, token_P, block_P[order_P].astype(np.uint16))


def ask(worker: Worker, call: Call) -> None:
    """Its rows have the bits of the resident's."""
    rows = worker.compute(call)
    worker.go_on()
    np.testing.assert_array_equal(rows, resident().compute(call))


def settle(worker: Worker) -> None:
    """All that is on its way arrives."""
    worker.slots.queue.wait(worker.slots._here.values())


def loads(worker: Worker) -> tuple[int, int]:
    """Blocks loaded as predicted, and when asked for."""
    stats = worker.slots.queue.stats()
    return stats.prefetch.count, stats.demand.count


def cells(*blocks: int, layer: int = LAYER) -> set:
    return {(layer, block) for block in blocks}


def test_predicted_blocks_are_loaded_before_they_are_asked_for(make):
    worker = make()
    worker.expect(5, LAYER, [3, 8, 1])
    settle(worker)
    assert worker.slots.cells == cells(3, 8, 1) and loads(worker) == (3, 0)
    ask(worker, decode(5, [8, 1, 3]))
    assert loads(worker) == (3, 0) and worker.reloads == 0


def test_misprediction_is_loaded_when_it_is_asked_for(make):
    worker = make()
    worker.expect(5, LAYER, [3, 8, 1])
    settle(worker)
    ask(worker, decode(5, [3, 9, 0]))
    assert loads(worker) == (3, 2) and worker.reloads == 2


def test_without_predictions_all_is_loaded_when_asked_for(make):
    worker = make()
    for count in range(3):
        ask(worker, decode(count, [count, 7, 4]))
        assert worker.slots.cells == set()
    assert loads(worker) == (0, 9) and worker.reloads == 9


def test_nothing_is_kept_and_the_next_layers_blocks_take_the_slots(make):
    worker = make()
    worker.expect(5, LAYER, [3, 8, 1])
    worker.expect(7, OTHER, [3, 4, 5])
    assert worker.slots.cells == cells(3, 8, 1)  # the slots are full
    ask(worker, decode(5, [3, 8, 1]))
    assert worker.slots.cells == cells(3, 4, 5, layer=OTHER)
    ask(worker, decode(7, [3, 4, 5], layer=OTHER))
    assert worker.slots.cells == set() and worker.slots.free == 3
    ask(worker, decode(8, [3, 8, 1]))  # again: loaded again
    assert worker.reloads == 3


def test_slots_that_are_left_are_for_the_layers_behind(make):
    worker = make(slots=4)
    worker.expect(9, OTHER, [6, 7])
    worker.expect(5, LAYER, [3, 8])
    worker.expect(7, OTHER, [3, 4])
    assert worker.slots.cells == cells(3, 8) | cells(3, 4, layer=OTHER)
    ask(worker, decode(5, [3, 8]))
    assert worker.slots.cells == cells(3, 4, 6, 7, layer=OTHER)
    ask(worker, decode(7, [3, 4], layer=OTHER))
    assert worker.slots.cells == cells(6, 7, layer=OTHER) and worker.reloads == 0


def test_answer_goes_before_what_the_next_layer_needs(make):
    worker = make()
    worker.expect(5, LAYER, [3, 8, 1])
    worker.expect(7, OTHER, [3, 4, 5])
    worker.compute(decode(5, [3, 8, 1]))
    assert worker.slots.cells == cells(3, 8, 1)
    worker.go_on()
    assert worker.slots.cells == cells(3, 4, 5, layer=OTHER)


def test_layer_that_asks_nothing_makes_way(make):
    worker = make()
    worker.expect(5, LAYER, [3, 8])
    worker.expect(7, OTHER, [3, 4])
    worker.passed(5)
    assert worker.slots.cells == cells(3, 4, layer=OTHER)
    worker.passed(4)  # this one has come late
    assert worker.slots.cells == cells(3, 4, layer=OTHER)
    ask(worker, decode(7, [4], layer=OTHER))
    assert worker.reloads == 0


def test_layers_that_were_never_asked_are_forgotten_by_a_later_one(make):
    worker = make()
    for count in (1, 3, 5):
        worker.expect(count, LAYER, [count])
    ask(worker, decode(4, [9]))
    assert worker.slots.cells == cells(5)


def test_later_prediction_of_a_layer_takes_the_place_of_the_first(make):
    worker = make()
    worker.expect(5, LAYER, [3, 8, 1])
    worker.expect(7, OTHER, [0, 2, 3])
    worker.expect(5, LAYER, [3, 6, 9])
    assert worker.slots.cells == cells(3, 6, 9)
    worker.expect(7, OTHER, [0, 2, 4])
    ask(worker, decode(5, [3, 6, 9]))
    assert worker.reloads == 0
    assert worker.slots.cells == cells(0, 2, 4, layer=OTHER)


@pytest.mark.parametrize("count", [3, 5])
def test_prediction_that_comes_when_its_layer_is_over_loads_nothing(make, count):
    worker = make()
    ask(worker, decode(5, [1]))
    worker.expect(count, LAYER, [3, 8, 1])
    assert worker.slots.cells == set()
    worker.expect(6, OTHER, [2])  # and does not stand before a later one
    assert worker.slots.cells == cells(2, layer=OTHER)


def test_more_blocks_than_slots_come_in_waves(make):
    worker = make(slots=2)
    worker.expect(5, LAYER, [3, 8, 1])  # of a group that has lost workers
    assert worker.slots.cells == cells(3, 8)
    ask(worker, decode(5, [1, 3, 8]))
    ask(make(slots=1), decode(5, [1, 3, 8]))


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_prompt_passes_block_by_block_through_few_slots(make, slots):
    worker = make(slots)
    worker.expect(3, LAYER, [1])
    for seed in range(2):
        call = prompt(11, seed)
        ask(worker, call)
        assert worker.slots.cells == set()
    part = np.flatnonzero(call.block_P % 2)  # another worker has the even ones
    few = Call(LAYER, 16, 0, call.x_TD, call.token_P[part], call.block_P[part])
    ask(worker, few)
    assert worker.reloads == 0  # these count decode steps
    ask(worker, decode(9, [3, 4]))


def test_slots_are_never_exceeded_whatever_comes(make):
    worker, rng = make(slots=3), np.random.default_rng(0)
    for count in range(1, 120):
        for _ in range(rng.integers(3)):
            coming, size = count + rng.integers(-3, 5), rng.integers(1, 5)
            blocks = rng.permutation(E)[:size].tolist()
            worker.expect(int(coming), int(rng.integers(1, 3)), blocks)
        kind = rng.integers(4)
        if kind == 0:
            worker.passed(count)
        elif kind == 1:
            ask(worker, prompt(5, count))
        else:
            blocks = rng.permutation(E)[: rng.integers(1, K + 1)].tolist()
            ask(worker, decode(count, blocks, int(rng.integers(1, 3))))
        used = [t.slot for t in worker.slots._here.values()]
        assert len(used) == len(set(used)) == 3 - worker.slots.free
        assert sorted(used + worker.slots._free) == [0, 1, 2]


class Clock:
    """Stands in for `time`: only who sleeps moves it on."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_emulated_link_takes_its_time_unless_it_was_foretold(make, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(worker_slots, "time", clock)
    monkeypatch.setattr(workers, "time", clock)
    worker = make()
    block_bytes = worker.slots.queue.block_bytes
    worker.begin(bytes_per_s=block_bytes / BLOCK_S)
    ask(worker, decode(1, [1, 2]))
    worker.expect(2, LAYER, [1, 2])
    clock.sleep(2.5 * BLOCK_S)
    ask(worker, decode(2, [1, 2]))
    worker.expect(3, LAYER, [1, 2, 5])
    clock.sleep(3.5 * BLOCK_S)
    ask(worker, decode(3, [1, 2, 6]))
    assert worker.wait_s == {1: 2 * BLOCK_S, 2: 0.0, 3: BLOCK_S}
    total = worker.slots.queue.stats()
    assert total.demand.bytes == 3 * block_bytes
    assert total.prefetch.seconds == 5 * BLOCK_S


def test_resident_worker_loads_nothing(make):
    worker = make()
    worker.begin(resident=True)
    worker.expect(5, LAYER, [3])
    ask(worker, decode(5, [8, 1, 3]))
    ask(worker, prompt(7))
    assert loads(worker) == (0, 0) and len(worker.compute_s) == 1
    worker.begin()
    ask(worker, decode(6, [3]))
    assert loads(worker) == (0, 1)


def test_call_that_cannot_be_is_refused_and_changes_nothing(make):
    worker = make()
    worker.expect(5, LAYER, [3])
    with pytest.raises(RequestError, match=f"layer 0, block 4.*below {E}"):
        worker.compute(decode(5, [4], layer=0))
    assert worker.slots.cells == cells(3)
    ask(worker, decode(5, [3]))
    assert worker.reloads == 0


def test_blocks_are_copied_when_there_is_time_or_when_they_are_wanted(make):
    worker = make()
    array = worker.slots.array
    ask(worker, decode(4, [7, 8, 9]))
    worker.expect(5, LAYER, [3, 8, 1])
    records = [worker.slots.carrier._store.record(LAYER, b) for b in (3, 8, 1)]

    def there() -> bool:
        slots = worker.slots.slot_E(LAYER, E)[[3, 8, 1]]
        return bool((np.asarray(array)[slots] == np.stack(records)).all())

    assert not there()
    worker.slots.carrier.copy()
    assert there()
    worker.expect(5, LAYER, [4, 5, 6])  # the shadow has started over
    worker.expect(5, LAYER, [3, 8, 1])
    ask(worker, decode(5, [3, 8, 1]))
