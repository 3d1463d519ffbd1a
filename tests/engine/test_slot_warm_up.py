"""After a warm-up nothing is traced or compiled, whatever rows do."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moe_edge.engine import slot_warm_up
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.model.sampling import Sampling
from tests.support.compilations import compilations
from tests.support.layered import StoreReader
from tests.support.running import MODELS, OPTIONS, engine_of, row, run, tokens_of
from tests.support.slow_cases import slow

# Capacities, chunks and numbers of rows by all their products: of a model whose layers
# compile fast, because how they are listed does not depend on the engine.
LARGE = {"max_rows": 4, "max_context": 1024, "prefill_chunk": 128, "prompt_rows": 4}
SMALL = {"max_rows": 2, "max_context": 256, "prefill_chunk": 32, "prompt_rows": 2}
DENSE = dataclasses.replace(MODELS["one_head"], dense_layers=(0, 1, 2))
DRAWN = Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=7)


def arrivals(chunk: int, long: int) -> list:
    """One row, then more: as many as fit, prompts of up to three chunks.

    The same prompts come again, after the prompt cache; `long` new tokens need the
    largest capacity.
    """
    return [
        (0, row("a", 9, 30, k=1)),
        (1, row("b", chunk + 12, 12, sampling=DRAWN, top_logprobs=3)),
        (3, row("c", 3 * chunk - 9, long, k=2, top_logprobs=20, score_prompt=True)),
        (5, row("d", 33, 9, forced=(1, 2, 3))),
        (20, row("e", chunk + 1, 4, sampling=DRAWN)),
        (22, row("f", chunk + 12, 12)),
        (22, row("g", 3 * chunk - 9, 4, k=2)),
        (22, row("h", 2, long, sampling=DRAWN, top_logprobs=0)),
        (22, row("i", chunk, 5, k=1)),
        (60, row("j", 2 * chunk, 3)),
    ]


LEAVING = [("c", 12), ("h", 9)]
CROWD = [(0, row(number, 30 + 40 * number, 6)) for number in range(4)]


@functools.cache
def dense() -> ResidentEngine:
    return ResidentEngine(load_weights(StoreReader(DENSE)))


def check(engine, sizes=SMALL, **options) -> None:
    slots = RowSlots(engine, **sizes, prompt_cache_bytes=10**7, **options)
    rows = arrivals(sizes["prefill_chunk"], sizes["max_context"] // 2)
    slots.warm_up()
    assert engine.moved().bytes == 0  # counters begin here
    compiled = slots.num_compiled()
    with compilations() as seen:
        got = tokens_of(run(slots, rows, leave=LEAVING))
        kept = slots.cache.num_bytes
        run(slots, CROWD)
        slots.admit([row("x", 50, 20)])
        for step in range(10):
            slots.step()
            slots.set_k("x", 1 + step % 3)
        slots.clear()
        run(slots, CROWD[:1])
    assert kept and not seen, sorted(set(seen))
    assert slots.num_compiled() == compiled
    assert {name: len(tokens) for name, tokens in got.items()} == {
        each.id: dict(LEAVING).get(each.id, each.max_new_tokens) for _, each in rows
    }


@pytest.mark.slow
def test_nothing_compiles_after_a_warm_up_of_many_shapes():
    check(dense(), LARGE)


@pytest.mark.parametrize(
    ("mode", "name", "options"),
    [
        ("resident", "gqa", {}),
        ("resident", "gqa", {"deterministic": True}),
        ("layered", "mla", {}),
        *slow(("waves", "gpt_oss", {}), ("fused", "gqa", {})),
    ],
)
def test_nothing_compiles_after_a_warm_up(mode, name, options):
    check(engine_of(mode, name), **options)


@pytest.mark.slow
def test_a_warm_up_needs_no_program_from_before():
    """Not even of `recover`, after programs were dropped (`few_memory_maps`)."""
    engine = engine_of("fused", "gqa")
    jax.clear_caches()
    check(engine)


@pytest.mark.slow
def test_programs_do_not_depend_on_what_a_warm_up_chooses(monkeypatch):
    """All rows choose the same three experts, which the four slots hold at once."""

    def same(engine, shape):
        return np.zeros(shape, np.int32)

    monkeypatch.setattr(slot_warm_up, "_tokens", same)
    options = OffloadOptions(**OPTIONS["waves"])
    with make_offloaded(StoreReader(MODELS["gpt_oss"]), options) as engine:
        check(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"assist": "fiddler"}, {"route": "substitute"}, {"layer_io": "packed"}],
)
def test_nothing_compiles_after_a_warm_up_of_other_programs(options):
    options = OffloadOptions(device_memory="50%", **options)
    with make_offloaded(StoreReader(MODELS["mla"]), options) as engine:
        check(engine)


def test_compilations_would_be_seen():
    slots = RowSlots(dense(), **SMALL | {"max_context": 100})
    with compilations() as seen:
        run(slots, [(0, row("a", 97, 2))])
    assert any("backend_compile" in event for event in seen)
