"""After a warm-up nothing is traced or compiled, whatever rows do."""

import numpy as np
import pytest

from moe_edge.engine import slot_warm_up
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.slots import RowSlots
from moe_edge.model.sampling import Sampling
from tests.support.compilations import compilations
from tests.support.layered import StoreReader
from tests.support.running import GQA, engine_of, row, run, tokens_of

SIZES = {"max_rows": 4, "max_context": 1024, "prefill_chunk": 128, "prompt_rows": 4}
DRAWN = Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=7)
# One row, then more: 1, 2, 3 and 4 of them, of both capacities, prompts of up to three
# chunks, and the same ones again, after the prompt cache.
ARRIVALS = [
    (0, row("a", 9, 30, k=1)),
    (1, row("b", 140, 12, sampling=DRAWN, top_logprobs=3)),
    (3, row("c", 300, 500, k=2, top_logprobs=20, score_prompt=True)),
    (5, row("d", 33, 9, forced=(1, 2, 3))),
    (20, row("e", 129, 4, sampling=DRAWN)),
    (22, row("f", 140, 12)),
    (22, row("g", 300, 4, k=2)),
    (22, row("h", 2, 700, sampling=DRAWN, top_logprobs=0)),
    (22, row("i", 128, 5, k=1)),
    (60, row("j", 256, 3)),
]
LEAVING = [("c", 12), ("h", 9)]
CROWD = [(0, row(number, 30 + 40 * number, 6)) for number in range(4)]
CASES = [
    ("resident", "one_head", {}),
    ("resident", "gqa", {"deterministic": True}),
    ("layered", "mla", {}),
    ("waves", "gpt_oss", {}),
    ("fused", "gqa", {}),
]


def check(engine, **options) -> None:
    slots = RowSlots(engine, **SIZES, prompt_cache_bytes=10**7, **options)
    slots.warm_up()
    assert engine.moved().bytes == 0  # counters begin here
    compiled = slots.num_compiled()
    with compilations() as seen:
        got = tokens_of(run(slots, ARRIVALS, leave=LEAVING))
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
        each.id: dict(LEAVING).get(each.id, each.max_new_tokens) for _, each in ARRIVALS
    }


@pytest.mark.parametrize(("mode", "name", "options"), CASES)
def test_nothing_compiles_after_a_warm_up(mode, name, options):
    check(engine_of(mode, name), **options)


def test_programs_do_not_depend_on_what_a_warm_up_chooses(monkeypatch):
    """All rows choose the same three experts, which the four slots hold at once."""

    def same(engine, shape):
        return np.zeros(shape, np.int32)

    monkeypatch.setattr(slot_warm_up, "_tokens", same)
    options = OffloadOptions(device_memory="17%")
    with make_offloaded(StoreReader(GQA), options) as engine:
        check(engine)


@pytest.mark.parametrize("options", [{"assist": "fiddler"}, {"route": "substitute"}])
def test_nothing_compiles_after_a_warm_up_of_other_programs(options):
    options = OffloadOptions(device_memory="50%", **options)
    with make_offloaded(StoreReader(GQA), options) as engine:
        check(engine)


def test_compilations_would_be_seen():
    slots = RowSlots(engine_of("resident", "gqa"), **SIZES | {"max_context": 100})
    with compilations() as seen:
        run(slots, [(0, row("a", 97, 2))])
    assert any("backend_compile" in event for event in seen)
