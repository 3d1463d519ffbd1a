"""Engines of several devices over tiny models: their bits, bytes and collectives."""

import dataclasses
import re

import jax
import numpy as np

from moe_edge.engine.mesh import local_mesh
from moe_edge.engine.sharded import ShardedEngine, load_sharded
from tests.support.tiny_models import MOE_ONLY, random_prompts

# One layer, and no number of devices but 1 and 11 divides its experts.
ONE_LAYER = dataclasses.replace(
    MOE_ONLY,
    num_layers=1,
    attention=dataclasses.replace(MOE_ONLY.attention, windows=(9,)),
    moe=dataclasses.replace(MOE_ONLY.moe, num_experts=11),
)
STEPS = 3


def sharded(reader, devices: int, **options) -> ShardedEngine:
    mesh = local_mesh(devices)
    return ShardedEngine(load_sharded(reader, mesh), mesh, **options)


def bits(engine, lengths, ks=None) -> np.ndarray:
    """uint32 [1 + STEPS, B, V]: logits after the prompts and of forced tokens.

    Args:
      ks: experts of each row's tokens; None: the model's.
    """
    config, B = engine.config, len(lengths)
    session = engine.new_session(B, max(lengths) + STEPS)
    if ks is not None:
        session.k_B = engine.put(np.array(ks, np.int32))
    found = [engine.prefill(session, random_prompts(config, lengths))]
    forced = np.array(random_prompts(config, [STEPS] * B, seed=1), np.int32)
    for tokens_B in forced.T:
        is_active_B = engine.put(np.ones(B, bool))
        found.append(engine.decode(session, engine.put(tokens_B), is_active_B))
    return np.stack(jax.device_get(found)).view(np.uint32)


def step_text(engine: ShardedEngine, rows: int) -> str:
    """The compiled program of a step of so many rows."""
    weights, session = engine.weights, engine.new_session(rows, 16)
    tokens_B, active_B = engine.put((np.zeros(rows, np.int32), np.ones(rows, bool)))
    lowered = engine.programs.decode.lower(
        *(weights.top, weights.layers, weights.experts, engine._windows),
        (tokens_B, session.positions_B, active_B),
        session.k_B,
        session.caches,
    )
    return lowered.compile().as_text()


def assert_shared(weights, devices: int) -> None:
    """Each device holds its share of every layer's records, and all the rest."""
    moe = weights.config.moe
    most = -(-moe.num_experts // devices)
    for records_SR in (layer.records_SR for layer in weights.experts if layer):
        record_bytes = records_SR.shape[1] * records_SR.dtype.itemsize
        shards = records_SR.addressable_shards
        assert len({shard.device for shard in shards}) == len(shards) == devices
        for shard in shards:
            assert shard.data.nbytes <= most * record_bytes
    for array in jax.tree.leaves((weights.top, weights.layers)):
        assert len(array.addressable_shards) == devices


def collectives(text: str) -> list[tuple[str, int]]:
    """(name, elements of its result) of each collective of a compiled program."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    # A GPU's begin and end: the end has the result.
    found = re.findall(rf" = \w+\[([\d,]*)\]\S* ({names})(?:-done)?\(", text)
    sizes = [np.prod([int(d) for d in dims.split(",") if d]) for dims, _ in found]
    return [(name, int(size)) for size, (_, name) in zip(sizes, found, strict=True)]
