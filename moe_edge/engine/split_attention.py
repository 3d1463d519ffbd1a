"""Attention split over devices: each computes its heads and keeps their part of the KV
cache.

Heads meet again before the product with `o`, which every device computes whole: summed
over devices it would be rounded otherwise. What a head gives depends on its own rows of
q, k and v alone. Rows of weights and of caches are cut by device, so that a cache's
first axis is (device, row of the batch, head of the device).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_edge.core.checks import ConfigError
from moe_edge.engine.devices import DeviceOptions, check_replicas
from moe_edge.engine.mesh import AXIS, PARTED, WHOLE, DeviceMesh
from moe_edge.engine.run_context import count_trace
from moe_edge.engine.sharded import ShardedEngine, ShardedPrograms, load_sharded
from moe_edge.engine.weights import Weights, bind_block
from moe_edge.model import kv_cache, quantised
from moe_edge.model.attention import Attention
from moe_edge.model.attention_config import AttentionConfig
from moe_edge.model.config import ModelConfig
from moe_edge.model.layers import add_params
from moe_edge.model.shapes import attention_shapes
from moe_edge.model.transformer import Block

# Of `attention_shapes`: rows of heads. Others are of every head, or follow the heads.
KV = ("k", "v", "k_bias", "v_bias")
BY_HEAD = ("q", "q_bias", "sinks", *KV)
AFTER = ("o", "o_bias")


def check_split(
    config: ModelConfig,
    devices: int,
    dense_kinds: Callable[[int], Mapping[str, str]] = lambda layer: {},
) -> None:
    """Raises ConfigError for attention that so many devices cannot split.

    Args:
      dense_kinds: of a layer's matrices in blocks, by name (of an open checkpoint).
    """
    for layer in range(config.num_layers):
        attention = config.attention_of(layer)
        reason = None
        if attention.has_state:
            reason = "a state is kept instead of keys and values"
        elif attention.kind == "mla":
            reason = "all heads of latent attention share one cache"
        elif attention.qk_norm == "full":
            reason = "a norm of q and k is taken over all heads"
        elif attention.num_heads % devices:
            reason = f"{attention.num_heads} heads cannot be shared equally"
        elif (heads := attention.num_kv_heads) % devices and devices % heads:
            reason = f"{heads} heads of k and v cannot be shared equally"
        elif name := _parts_an_eight(config, attention, devices, dense_kinds(layer)):
            reason = f"rows of {name} stand in eights, and a device's are no whole ones"
        if reason is not None:
            raise ConfigError(
                f"split_attention with {devices} devices: in layer {layer} {reason}; "
                "leave it out"
            )


def _parts_an_eight(config: ModelConfig, attention, devices: int, kinds) -> str | None:
    """A matrix whose rows stand interleaved, with an eight that two devices share."""
    shapes = attention_shapes(own_attention(attention, devices), config.d_model)
    for name in BY_HEAD:
        in_eights = quantised.is_interleaved(kinds.get(f"attn.{name}"))
        if in_eights and shapes[name][0] % quantised.EIGHT:
            return name
    return None


def own_attention(attention: AttentionConfig, devices: int) -> AttentionConfig:
    """The attention of one device's heads; a head of k and v may be on several."""
    own_kv = max(1, attention.num_kv_heads // devices)
    heads = {"num_heads": attention.num_heads // devices, "num_kv_heads": own_kv}
    return dataclasses.replace(attention, **heads)


class OwnAttention(Attention):
    """Attention of a device's heads, without the product with `o`."""

    def __init__(
        self,
        own: AttentionConfig,
        d_model: int,
        eps: float,
        plus_one: bool,
        rngs: nnx.Rngs,
    ):
        self.config, self.eps, self.plus_one = own, eps, plus_one
        shapes = attention_shapes(own, d_model)
        add_params(self, {n: s for n, s in shapes.items() if n not in AFTER}, rngs)

    def _output(self, y_BSR, gate_BSR=None) -> jax.Array:
        return self._gated(y_BSR, gate_BSR)


@functools.cache
def _own_graph(
    own: AttentionConfig, d_model: int, eps: float, plus_one: bool
) -> nnx.GraphDef:
    given = own, d_model, eps, plus_one
    made = nnx.eval_shape(lambda: OwnAttention(*given, nnx.Rngs(0)))
    return nnx.split(made)[0]


class SplitAttention(Attention):
    """Attention whose heads are computed by the devices of a mesh."""

    def __init__(
        self, config: ModelConfig, layer: int, rngs: nnx.Rngs, mesh: DeviceMesh
    ):
        super().__init__(config, layer, rngs)
        self.mesh, self.d_model = mesh, config.d_model

    def __call__(self, x_BSD, tables, start_B, window, cache=None):
        own = own_attention(self.config, self.mesh.size)
        names = [n for n in attention_shapes(own, self.d_model) if n not in AFTER]
        graph = _own_graph(own, self.d_model, self.eps, self.plus_one)

        def attend(weights, x_BSD, tables, start_B, window, cache):
            attention = bind_block(graph, weights)
            y_BSR, cache = attention(x_BSD, tables, start_B, window, cache)
            return lax.all_gather(y_BSR, AXIS, axis=2, tiled=True), cache

        specs = {name: PARTED if name in BY_HEAD else WHOLE for name in names}
        run = self.mesh.per_device(
            attend, (specs, *(WHOLE,) * 4, PARTED), (WHOLE, PARTED)
        )
        weights = {name: getattr(self, name)[...] for name in names}
        y_BSR, cache = run(weights, x_BSD, tables, start_B, window, cache)
        return self._output(y_BSR), cache


class SplitBlock(Block):
    """A layer with `SplitAttention`."""

    def __init__(
        self, config: ModelConfig, layer: int, rngs: nnx.Rngs, mesh: DeviceMesh
    ):
        super().__init__(config, layer, rngs)
        self.attn = SplitAttention(config, layer, rngs, mesh)


class SplitEngine(ShardedEngine):
    """Runs a model whose experts and heads are shared by the devices of a mesh.

    Args: as of `ShardedEngine`; weights are those of `split_weights`.
    """

    def _new_programs(self, config, top=None):
        block = functools.partial(SplitBlock, mesh=self.mesh)
        return ShardedPrograms(config, self.mesh, top, block=block)

    def new_cache(self, layer, batch, capacity):
        own = own_attention(self.config.attention_of(layer), self.mesh.size)
        return _new_cache(self.mesh, own, batch, capacity)

    def new_caches(self, batch, capacity):
        layers = range(self.config.num_layers)
        return [self.new_cache(layer, batch, capacity) for layer in layers]

    def put_cache(self, cache):
        return jax.device_put(cache, self.mesh.parted)

    def cache_arrays(self, layer, batch, capacity):
        return jax.eval_shape(lambda: self.new_cache(layer, batch, capacity))

    def cache_heads(self, layer):
        attention = self.config.attention_of(layer)
        return own_attention(attention, self.mesh.size).num_kv_heads

    def row_copies(self):
        read = functools.partial(_read_row, self.mesh)
        return read, functools.partial(_write_row, self.mesh)


def _read_row(mesh: DeviceMesh, cache, row, start, size: int, heads: int):
    read = functools.partial(kv_cache.read_row, size=size, heads=heads)
    return mesh.per_device(read, (PARTED, WHOLE, WHOLE), PARTED)(cache, row, start)


def _write_row(mesh: DeviceMesh, cache, row, start, part):
    specs = PARTED, WHOLE, WHOLE, PARTED
    write = mesh.per_device(kv_cache.write_row, specs, PARTED)
    return write(cache, row, start, part)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _new_cache(mesh: DeviceMesh, own: AttentionConfig, batch: int, capacity: int):
    zeros = functools.partial(kv_cache.empty_cache, own, batch, capacity)
    return mesh.per_device(zeros, (), PARTED)()


def make_sharded(
    reader,
    mesh: DeviceMesh,
    shared: DeviceOptions,
    *,
    check_finite: bool = False,
    **options,
) -> ShardedEngine:
    """Loads a checkpoint onto a mesh.

    Args:
      shared: what the devices share, and how.
      **options: of `ResidentEngine`.
    Raises: as `load_sharded`, `check_split`, `check_replicas` and `count_trace`.
    """
    if shared.split_attention:
        check_split(reader.config, mesh.size, reader.dense_kinds)
    check_replicas(reader, mesh, shared.devices_replicas)
    counts_LE = None
    if shared.devices_trace is not None:
        counts_LE = count_trace(shared.devices_trace, reader.config)
    placing = {"counts_LE": counts_LE, "replicas": shared.devices_replicas}
    weights = load_sharded(reader, mesh, check_finite, **placing)
    if shared.split_attention:
        return SplitEngine(split_weights(weights, mesh), mesh, **options)
    return ShardedEngine(weights, mesh, **options)


def split_weights(weights: Weights, mesh: DeviceMesh) -> Weights:
    """The weights of `load_sharded` with the rows of heads cut by device."""
    layers = []
    for number, layer in enumerate(weights.layers):
        heads, own = weights.config.attention_of(number).num_kv_heads, dict(layer)
        for name in BY_HEAD:
            array = layer.get(f"attn.{name}")
            if array is not None:
                if name in KV and mesh.size > heads:
                    array = _repeated(array, heads, mesh.size // heads)
                own[f"attn.{name}"] = jax.device_put(array, mesh.parted)
        layers.append(own)
    return dataclasses.replace(weights, layers=tuple(layers))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _repeated(matrix, heads: int, times: int):
    """The rows of each head as often as devices have it; blocks by their rows."""

    def repeat(array: jax.Array) -> jax.Array:
        by_head = array.reshape(heads, -1, *array.shape[1:])
        return jnp.repeat(by_head, times, axis=0).reshape(-1, *array.shape[1:])

    return jax.tree.map(repeat, matrix)
