"""The running batch moves between sessions of few sizes, within its budget."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_edge.engine import slot_programs
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.session import cache_bytes
from moe_edge.engine.slots import RowSlots
from tests.support.running import SIZES, alone, engine_of, row, tokens_of
from tests.support.tiny_models import GQA, random_weights


def test_prompts_that_end_together_move_the_batch_once(monkeypatch):
    sizes = SIZES | {"max_context": 256, "prefill_chunk": 128}  # where both run at once
    slots = RowSlots(engine_of("resident", "gqa"), **sizes)
    made, new_session = [], slots.shapes.new_session

    def note(engine, batch, *args, **options):
        made.append(batch)
        return new_session(engine, batch, *args, **options)

    monkeypatch.setattr(slots.shapes, "new_session", note)
    slots.admit([row("a", 9, 4), row("b", 12, 4)])
    slots.prefill()
    assert made == [2, 2]  # of the prompts, of the batch
    assert slots.num_rows == 2 and len(slots.decode()) == 2


@pytest.fixture
def steps(monkeypatch):
    """Slots over a resident engine, and the rows of each step that it computes."""
    slots = RowSlots(engine_of("resident", "gqa"), **SIZES)
    seen, decode = [], slots.engine.decode

    def note(session, tokens_B, active_B, *args):
        seen.append(np.asarray(active_B).sum())
        return decode(session, tokens_B, active_B, *args)

    monkeypatch.setattr(slots.engine, "decode", note)
    return slots, seen


def tokens_by_row(slots: RowSlots, steps: int | None = None) -> dict:
    """New tokens of so many steps, or of all; rows are released at their last."""
    found: dict = {}
    while slots.is_busy and steps != 0:
        for new in slots.step():
            found.setdefault(new.id, []).append(new.token)
            if not slots[new.id].is_active and slots[new.id].place is not None:
                slots.release(new.id)
        steps = None if steps is None else steps - 1
    return found


def test_next_step_begins_before_tokens_are_told(steps):
    slots, seen = steps
    asked = row("a", 9, 6, k=3)
    slots.admit([asked])
    first = slots.step()  # of its prompt
    assert seen == []
    for step in range(1, 6):
        told = slots.step()
        assert len(told) == 1 and len(seen) == min(step + 1, 5)  # none beyond the last
        first += told
    assert [new.token for new in first] == alone("gqa", asked)


def test_row_that_leaves_is_no_reason_to_compute_a_step_again(steps):
    slots, seen = steps
    a, b = row("a", 9, 9, k=3), row("b", 12, 9, k=3)
    slots.admit([a, b])
    got = tokens_by_row(slots, 4)
    slots.release("a")
    rest, num_steps = tokens_by_row(slots), len(seen)
    assert got["b"] + rest["b"] == alone("gqa", b)
    assert got["a"] == alone("gqa", a)[: len(got["a"])] and "a" not in rest
    assert num_steps == 1 + 8  # "a" before "b" came; the tokens of "b" after its first


def test_begun_step_at_another_k_is_computed_again(steps):
    slots, seen = steps
    asked = row("a", 9, 9, k=3)
    slots.admit([asked])
    first = tokens_by_row(slots, 4)["a"]
    slots.set_k("a", 1)
    rest = tokens_by_row(slots)["a"]
    assert len(seen) == 8 + 1
    monitor = RowSlots(slots.engine, **SIZES)  # the same, each step asked for alone
    monitor.on_routing = lambda layer, routing: None
    monitor.admit([asked])
    again = tokens_by_row(monitor, 4)["a"]
    monitor.set_k("a", 1)
    assert first + rest == again + tokens_by_row(monitor)["a"]


def test_row_that_joins_takes_part_in_the_next_step(steps):
    slots, _ = steps
    a, b = row("a", 9, 12, k=3), row("b", 12, 6, k=1)
    slots.admit([a])
    got = tokens_by_row(slots, 4)
    slots.admit([b])
    first = slots.prefill()  # before the step that has begun is taken
    assert [new.id for new in first] == ["b"]
    second = slots.decode()
    assert {new.id for new in second} == {"a", "b"}
    rest = tokens_by_row(slots)
    tokens = {new.id: new.token for new in second}
    assert [*got["a"], tokens["a"], *rest["a"]] == alone("gqa", a)
    assert [first[0].token, tokens["b"], *rest["b"]] == alone("gqa", b)


LAYERS = 8
LONG = {"max_rows": 4, "max_context": 1024, "prefill_chunk": 64, "prompt_rows": 2}


@pytest.fixture(scope="module")
def deep():
    """An engine of so many layers that one of them is little beside all."""
    attention = dataclasses.replace(GQA.attention, windows=(None,) * LAYERS)
    config = dataclasses.replace(GQA, num_layers=LAYERS, attention=attention)
    return ResidentEngine(random_weights(config))


class Meter:
    """Bytes of all caches there are, whenever one is made or copied."""

    def __init__(self, engine, monkeypatch):
        self.most, self._width = 0, engine.config.attention.head_dim
        self._before = jax.live_arrays()  # held: an id stays theirs
        self._others = {id(array) for array in self._before}
        for owner, name in (
            (engine, "new_cache"),
            (engine, "new_session"),
            (slot_programs.SlotPrograms.of(engine), "read_row"),
            (slot_programs.SlotPrograms.of(engine), "write_row"),
        ):
            monkeypatch.setattr(owner, name, self._metered(getattr(owner, name)))

    def _metered(self, function):
        def run(*args, **options):
            result = function(*args, **options)
            self.most = max(self.most, self.now())
            return result

        return run

    def now(self) -> int:
        return sum(
            array.nbytes
            for array in jax.live_arrays()
            if not array.is_deleted() and array.shape[-1:] == (self._width,)
            if id(array) not in self._others
        )


@pytest.mark.slow
def test_caches_are_within_the_budget_also_while_the_batch_moves(deep, monkeypatch):
    slots = RowSlots(deep, **LONG)
    meter = Meter(deep, monkeypatch)
    long, short = row("long", 500, 500), row("short", 30, 20)
    rows = [dataclasses.replace(short, id=name) for name in "abc"]

    def together(*rows) -> int:
        return slots.together_bytes([slots.row_bytes(each.need) for each in rows])

    budget = together(long, rows[0])  # four short ones fit too
    peak = slots.shapes.peak_bytes(budget)
    assert together(*rows) <= budget and peak < 1.25 * budget
    within = [slots.shapes.bytes_within(peak + more) for more in (-9, 0)]
    assert within[0] < budget <= within[1] < budget + 9
    got = {}

    def steps(count):
        for _ in range(count):
            for new in slots.step():
                got.setdefault(new.id, []).append(new)

    for joining, leaving, count, size in (
        ([rows[0]], [], 1, (1, 128)),
        ([long], [], 10, (2, 512)),  # its prompt takes 8 chunks
        ([], [], 12, (2, 1024)),  # it has grown
        ([], ["a"], 3, (1, 1024)),
        ([rows[1]], [], 3, (2, 1024)),
        ([], ["long"], 3, (1, 128)),
        ([rows[2], dataclasses.replace(short, id="d")], [], 3, (4, 128)),
    ):
        for id in leaving:
            slots.release(id)
        slots.admit(joining)
        meter.most = 0
        steps(count)
        assert (len(slots._batch.places), slots._batch.session.capacity) == size
        prompts = 0
        if joining:
            rows_there = slots.shapes.prompt_rows_for(len(joining))
            longest = max(len(each.prompt) for each in joining)
            capacity = slots.shapes.prompt_capacity_for(longest)
            prompts = cache_bytes(deep.config, rows_there, capacity)
        assert meter.most - prompts <= peak
    alone = RowSlots(deep, **LONG)
    alone.admit([rows[1]])
    expected = [new for _ in range(10) for new in alone.step()]
    count = len(got["b"])
    assert tokens_of({"b": expected[:count]})["b"] == tokens_of(got)["b"]


def test_batch_grows_as_its_rows_lengthen():
    engine, longest = engine_of("resident", "gqa"), {"max_context": 512}
    got, capacities = {}, []
    for deterministic in (False, True):  # True: always of the largest capacity
        slots = RowSlots(engine, **SIZES | longest, deterministic=deterministic)
        slots.admit([row("a", 100, 200), row("b", 90, 20, k=1)])
        new = []
        while slots.is_busy:
            new += slots.step()
            if not deterministic and slots._batch.session:
                capacities.append(slots._batch.session.capacity)
            if "b" in slots.ids and not slots.has_prompts and slots["b"].emitted == 20:
                slots.release("b")
        got[deterministic] = sorted((each.id, each.token) for each in new)
    assert got[False] == got[True] and len(got[True]) == 220
    assert sorted(set(capacities)) == [128, 256, 512] == list(dict.fromkeys(capacities))


def test_moved_rows_keep_their_bits(deep):
    """Rows in a batch that moves twice, against rows in one that never moves."""
    rows = [row("a", 40, 30, top_logprobs=0), row("b", 300, 30, top_logprobs=0)]
    slots = RowSlots(deep, **LONG)
    slots.admit([rows[1]])
    while slots.has_prompts:
        slots.step()
    before = [jax.device_get(cache) for cache in slots._batch.session.caches]
    length = slots["b"].length
    slots.admit([rows[0]])
    slots.step()  # -> two rows, of other places
    after = slots._batch.session.caches
    place, heads = slots["b"].place, GQA.attention.num_kv_heads
    for old, new in zip(before, after, strict=True):
        for name, array in old.items():
            moved = jax.device_get(new[name])[place * heads : (place + 1) * heads]
            assert (moved[:, :length] == array[:, :length]).all()
    assert len(slots._batch.places) == 2
