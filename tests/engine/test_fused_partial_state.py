"""Mode fused fetches what a partial state names, and names what mode layered does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.engine.fused_prefetch import Prefetch
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.kernels import few, native
from moe_edge.predict.base import NOT_WANTED, best_first
from moe_edge.predict.stale_gate import (
    DevicePredictor,
    LooksAhead,
    StaleGate,
    is_by_programs,
)
from tests.engine.test_fused_prefetch import check_bits, model_of, options_of
from tests.support.gpu_kernels import interpreted_kernels
from tests.support.layered import StoreReader
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, random_prompts

STEPS = 8
PEEKS = {"predictor": "smoe_partial", "predictor_options": {"top_a": None}}
needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)


@pytest.fixture(autouse=True)
def kernels_are_possible(monkeypatch):
    """CI also runs these tests where XLA multiplies."""
    monkeypatch.delenv("MOE_EDGE_KERNELS", raising=False)


def named_by(engine, said, lengths) -> list[list[tuple[int, np.ndarray]]]:
    """(layer, scores that it wanted of the next one) by step, from empty slots on.

    Args:
      said: a list that grows while the engine runs.
    """
    session = engine.new_session(len(lengths), 64)
    engine.prefill(session, random_prompts(engine.config, lengths))
    engine.restart()
    tokens = random_prompts(engine.config, [STEPS] * len(lengths), seed=1)
    found, active_B = [], np.ones(len(lengths), bool)
    for step in range(STEPS):
        active_B[1:2] = step < STEPS // 2
        tokens_B = np.array([row[step] for row in tokens], np.int32)
        said.clear()
        jax.block_until_ready(
            engine.decode(session, *engine.put((tokens_B, active_B.copy())))
        )
        jax.effects_barrier()
        found.append(sorted(said, key=lambda each: each[0]))
    return found


def said_by_layered(reader, lengths, **options):
    """Where nothing is fetched ahead, so that slots hold what they hold in fused."""
    options = options_of(**options, mode="layered", prefetch_in_fused=False)
    with make_offloaded(reader, options) as engine:
        said = []
        engine.layer_step.prefetch = lambda visit: None
        engine.predictor_run.store = lambda layer, wanted_NE: said.append(
            (layer, np.array(wanted_NE[0]))
        )
        return named_by(engine, said, lengths)


def said_by_fused(reader, lengths, monkeypatch, **options):
    said, own = [], Prefetch._best

    def note(layer, wanted_E):
        if (wanted_E > NOT_WANTED).any():
            said.append((int(layer) - 1, np.array(wanted_E)))

    def best(self, coming, wanted_E, *rest):
        jax.debug.callback(note, coming.layer, wanted_E)
        return own(self, coming, jnp.full_like(wanted_E, NOT_WANTED), *rest)

    monkeypatch.setattr(Prefetch, "_best", best)
    with make_offloaded(reader, options_of(**options)) as engine:
        return named_by(engine, said, lengths)


@needs_kernels
@pytest.mark.parametrize(
    "name, lengths, top_a, memory",
    [
        ("gqa", (9,), 0.0, "40%"),
        # Among experts of one look-up of several rows the modes' LRU differ in who goes
        # first, so here none has to.
        ("gqa", (9, 4, 7), None, "100%"),
        *slow(("gqa", (9,), None, "40%"), ("gqa", (9, 4, 7), 0.2, "100%")),
        *slow(("states", (9,), None, "50%"), ("mla", (9, 4), None, "100%")),
    ],
)
def test_it_names_what_mode_layered_names(name, lengths, top_a, memory, monkeypatch):
    config = model_of(name, ALL[name].num_layers)
    reader, last = StoreReader(config, dtype=np.float32), config.num_layers - 1
    options = PEEKS | {"predictor_options": {"top_a": top_a}, "device_memory": memory}
    want = said_by_layered(reader, lengths, **options)
    got = said_by_fused(reader, lengths, monkeypatch, **options)
    assert [[layer for layer, _ in each] for each in got] == [
        [layer for layer, _ in each if layer < last] for each in want
    ]
    rounds = 0
    for in_layered, in_fused in zip(want, got, strict=True):
        for (_, want_E), (_, got_E) in zip(in_layered, in_fused, strict=True):
            want_ids, got_ids = best_first(want_E[None])[0], best_first(got_E[None])[0]
            np.testing.assert_array_equal(got_ids, want_ids)
            np.testing.assert_allclose(got_E, want_E, rtol=1e-5)
            rounds += 1
    assert STEPS / 2 < rounds <= last * STEPS


@needs_kernels
@pytest.mark.parametrize(
    "name, dtype, lengths, options",
    [
        ("gqa", np.float32, (9,), {"device_memory": "40%"}),
        *slow(
            ("gqa", BF16, (20, 3, 33), {}),
            # Fewer slots than a token's experts: waves.
            ("gqa", np.float32, (9,), {"device_memory": "17%"}),
            ("states", np.float32, (9, 4), {}),
            ("gpt_oss", np.float32, (9,), {"eviction": "lfu", "device_memory": "40%"}),
            ("mla", BF16, (9, 4), {}),
        ),
    ],
)
def test_a_step_has_the_bits_of_the_resident_engine(name, dtype, lengths, options):
    engine, _ = check_bits(
        model_of(name, ALL[name].num_layers), dtype, lengths, **PEEKS, **options
    )
    assert engine.lossless and engine.report()["prefetch"] == "smoe_partial"


@pytest.mark.slow
@needs_kernels
def test_all_of_smoe_in_fused():
    options = {"route": "substitute", "route_options": {"a": 0.5}}
    options |= {"eviction": "smoe_score", "device_memory": "50%"}
    engine, _ = check_bits(model_of("gqa"), np.float32, (9,), **PEEKS, **options)
    assert not engine.lossless and engine.moved().substituted > 0


@pytest.mark.slow
@needs_kernels
def test_the_host_helps_besides():
    options = {"assist": "two_pointer", "assist_in_fused": True}
    reader = StoreReader(model_of("gqa"), dtype=np.float32)
    lengths = (9, 4, 7)
    with make_offloaded(reader, options_of(**PEEKS, **options)) as engine:
        assert named_by(engine, [], lengths) and engine.moved().prefetch_bytes > 0
        assert engine.report()["host_computed"] > 0


@pytest.mark.slow
@needs_kernels
def test_bits_where_nothing_is_copied_before_it_is_computed():
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, "1")
        patch.setattr(few, "MISS_PROGRAMS", 3)
        given = {"zero_copy": True, "device_memory": "75%"}
        engine, _ = check_bits(model_of("gqa"), BF16, (9,), **PEEKS, **given)
        assert engine.report()["zero_copy"]


@needs_kernels
def test_a_look_copies_neither_slots_nor_caches():
    config = model_of("gqa")
    with make_offloaded(StoreReader(config), options_of(**PEEKS)) as engine:
        session = engine.new_session(1, 64)
        engine.prefill(session, random_prompts(config, (9,)))
        token_B, active_B = engine.put((np.ones(1, np.int32), np.ones(1, bool)))
        text = (
            engine.programs.decode.lower(
                *(engine.weights.top, engine._with_gates, engine._state),
                *(token_B, session.positions_B, active_B, session.k_B),
                session.caches,
            )
            .compile()
            .as_text()
        )
        large = jax.tree.leaves((engine._state.slots_SR, session.caches))
        shapes = {",".join(map(str, array.shape)) for array in large}
        copied = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)
        assert copied and not shapes & {*copied}


class SortsItself(DevicePredictor):
    name, needs = "sorts_itself", frozenset({"partial_state"})

    def predict(self, state, layer, horizon):
        return super().predict(state, layer, horizon)


class WantsMore(DevicePredictor):
    name, needs = "wants_more", frozenset({"partial_state", "ids"})


def test_who_needs_the_host_is_known():
    class Plain(DevicePredictor):
        needs = frozenset({"partial_state"})

    assert is_by_programs(Plain) and is_by_programs(StaleGate)
    assert not any(map(is_by_programs, (SortsItself, WantsMore, DevicePredictor)))
    assert is_by_programs(LooksAhead)
