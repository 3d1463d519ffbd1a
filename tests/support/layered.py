"""Layered engines over tiny random models, and the bits they have to produce."""

import functools

import jax
import numpy as np

from moe_edge.checkpoint.schema import item_shapes
from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.offload.store import device_dtype
from tests.support.tiny_models import (
    ALL,
    RandomReader,
    random_prompts,
    random_weights,
)

STEPS = 64
CAPACITY = 128  # of every session: one shape
NINE, THREE = (9,), (20, 3, 33)
BLOCKS = 24  # of the tiny models: 2 MoE layers of 12 experts


class StoreReader(RandomReader):
    """A random reader that also fills a store."""

    path = "random"

    def dense_dtypes(self, item):
        return dict.fromkeys(item_shapes(self.config, item), self._dense)

    def release(self):
        pass


@functools.cache
def _programs(name, dtype) -> LayerPrograms:
    stored = RandomReader(ALL[name], dtype=dtype).dtype
    return LayerPrograms(ALL[name], device_dtype(stored))


def layered(
    name="gqa", dtype=np.float32, slots=9, with_trace=True, devices=1, **options
) -> LayeredEngine:
    """A new engine; those of one model share compiled programs (and `num_compiled`).

    All layers share its slots, unless a plan is given. Several devices are homes, each
    with so many slots.
    """
    given = {"mode": "layered", "slot_plan": "one_pool"} | options
    options = OffloadOptions(device_memory=f"{100 * slots / BLOCKS}%", **given)
    reader = StoreReader(ALL[name], dtype=dtype)
    programs = _programs(name, dtype)
    given = {"with_trace": with_trace, "programs": programs}
    if devices > 1:
        given["devices"] = jax.local_devices()[:devices]
    engine = make_offloaded(reader, options, **given)
    assert engine.cache.spec.num_slots == devices * slots
    return engine


def forced_logits(engine, prompts, steps=STEPS, on_routing=None):
    """Logits `[1 + steps, B, V]` of prefill and given tokens; row 1 ends half-way.

    The tokens are random: greedy ones of a random model soon repeat themselves, and
    every cache hits.
    """
    forced = random_prompts(engine.config, [steps] * len(prompts), seed=1)
    session = engine.new_session(len(prompts), CAPACITY)
    out = [engine.prefill(session, prompts, on_routing)]
    active = np.ones(len(prompts), bool)
    for step in range(steps):
        if step == steps // 2 and len(prompts) > 1:
            active[1] = False
        tokens = engine.put(np.array([row[step] for row in forced], np.int32))
        active_B = engine.put(active.copy())
        out.append(engine.decode(session, tokens, active_B, on_routing))
    return np.stack(jax.device_get(out))


@functools.cache
def resident_of(name, dtype) -> ResidentEngine:
    return ResidentEngine(random_weights(ALL[name], dtype=dtype))


@functools.cache
def resident_logits(name, dtype, lengths, steps=STEPS):
    prompts = random_prompts(ALL[name], lengths)
    return forced_logits(resident_of(name, dtype), prompts, steps)


def assert_same_bits(engine, name, dtype, lengths, steps=STEPS, **kwargs):
    """Gate A against the resident engine; returns the logits."""
    logits = forced_logits(engine, random_prompts(ALL[name], lengths), steps, **kwargs)
    np.testing.assert_array_equal(logits, resident_logits(name, dtype, lengths, steps))
    return logits
