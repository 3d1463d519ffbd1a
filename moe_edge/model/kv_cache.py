"""The key/value cache of one layer: preallocated, written in place by donation.

A cache is a plain dict of arrays with a fixed capacity M, so that a step keeps
one shape while the sequence grows; layers may differ in heads and widths. Grouped-query
attention holds `k` and `v` `[B * G, M, P]` (v perhaps of another width); latent
attention holds `latent` `[B, M, R_kv + rope]`; a first axis of 1 is left out. Row b's
tokens stand at positions 0, 1, ...; what lies beyond a row's length is garbage that the
causal mask hides until it is overwritten. Layers of `state_config` hold states a row
instead, `[B, rows, width]`, which no position names: they are copied whole, and always
float32. Keys and values may take fewer bytes (`cache_types.py`); the last axis is then
that of the stored rows.

These are the shapes of the products over a cache. Where XLA:CPU has to reshape the
cache of one sequence it makes four copies of it a step (12 heads of 64, 512 tokens:
0.8 ms instead of 0.16).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.model import cache_types
from moe_edge.model.config import Mixer, ModelConfig

Cache = dict[str, jax.Array]
STATES = ("state", "window")  # arrays of layers of `state_config`


def cache_arrays(
    attention: Mixer, batch: int, capacity: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Array name -> what the cache of a layer with such attention or state holds."""
    if attention.has_state:
        shapes = attention.state_shapes(batch).items()
        return {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes}
    rows = batch * attention.cache_heads
    first = () if rows == 1 else (rows,)
    return {
        name: cache_types.stored(attention.cache_type, (*first, capacity, width))
        for name, width in attention.cache_widths.items()
    }


def cache_bytes(attention: Mixer, batch: int, capacity: int) -> int:
    """Bytes of the cache of a layer with such attention."""
    arrays = cache_arrays(attention, batch, capacity).values()
    return sum(array.size * array.dtype.itemsize for array in arrays)


def empty_cache(attention: Mixer, batch: int, capacity: int, sharding=None) -> Cache:
    """A zeroed cache of one layer.

    Args:
      sharding: of its arrays, where they are for several devices.
    """
    return _zeros((_sorted_arrays(attention, batch, capacity),), sharding)[0]


def empty_caches(
    config: ModelConfig, batch: int, capacity: int, sharding=None
) -> list[Cache]:
    """Those of all layers, by one program: a call an array takes longer."""
    layers = map(config.attention_of, range(config.num_layers))
    arrays = tuple(_sorted_arrays(each, batch, capacity) for each in layers)
    return _zeros(arrays, sharding)


def _sorted_arrays(*given) -> tuple[tuple[str, jax.ShapeDtypeStruct], ...]:
    return tuple(sorted(cache_arrays(*given).items()))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(layers: tuple[tuple[tuple[str, Any], ...], ...], sharding) -> list[Cache]:
    caches = [
        {name: jnp.zeros(each.shape, each.dtype) for name, each in arrays}
        for arrays in layers
    ]
    return (
        caches if sharding is None else lax.with_sharding_constraint(caches, sharding)
    )


def write(
    cache: jax.Array, new_RSP: jax.Array, start_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Puts `new` at positions start_B[b] .. start_B[b] + S - 1 of the heads of row b.

    The caller sees to it that start + S <= M (XLA would shift the write silently).

    Args:
      cache: an array of `cache_arrays`.
      new_RSP: float32; R = rows of the batch * heads.
      start_B: int32, position of the first token of each row of the batch.
    Returns:
      (the cache, its values as float32 `[R, M, P]`).
    """
    new_RSP = cache_types.encode(new_RSP, cache.dtype)
    cache, (R, _, P) = put(cache, new_RSP, start_B), new_RSP.shape
    return cache, cache_types.decode(cache.reshape(R, -1, P))


def put(cache: jax.Array, new_RSP: jax.Array, start_B: jax.Array) -> jax.Array:
    """The cache with rows that are as it stores them; otherwise as `write`."""
    B, R = start_B.shape[0], new_RSP.shape[0]
    if R == 1:
        return jax.lax.dynamic_update_slice(cache, new_RSP[0], (start_B[0], 0))
    if B == 1:
        return jax.lax.dynamic_update_slice(cache, new_RSP, (0, start_B[0], 0))
    each = jax.vmap(
        lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0))
    )
    return each(cache, new_RSP, jnp.repeat(start_B, R // B))


def read(cache: jax.Array, start_B: jax.Array, count: int) -> jax.Array:
    """`[R, count, P]`, as stored: what stands at positions start_B[b] and after.

    Args:
      count: positions of every row (static).
    """
    rows_RMP = cache if cache.ndim == 3 else cache[None]
    R, _, P = rows_RMP.shape

    def take(row_MP, start):
        return jax.lax.dynamic_slice(row_MP, (start, 0), (count, P))

    return jax.vmap(take)(rows_RMP, jnp.repeat(start_B, R // start_B.shape[0]))


def visible(
    start_B, num_queries: int, num_keys: int, window, chunked: bool = False, first=0
) -> jax.Array:
    """Which keys each query sees, bool `[B, S, M]`.

    Args:
      start_B: position of the first query of each row.
      window: int32 scalar, how many latest positions a query sees.
      chunked: it sees those of its own chunk instead: chunks are of `window` positions.
      first: position of the first key.
    """
    queries = start_B[:, None, None] + jnp.arange(num_queries).reshape(1, -1, 1)
    keys = first + jnp.arange(num_keys).reshape(1, 1, -1)
    if chunked:
        return (keys <= queries) & (keys >= queries // window * window)
    return (keys <= queries) & (keys > queries - window)


def read_row(cache: Cache, row, start, size: int | None, heads: int) -> Cache:
    """A part of a row of the batch: `[heads, size, P]` of each array.

    Args:
      cache: of one layer.
      row, start: int32 scalars: row of the batch, first position.
      size: positions (static); None: all, which states are read by.
      heads: `AttentionConfig.cache_heads` of the layer (static).
    """

    def take(array):
        array_RMP = array if array.ndim == 3 else array[None]
        shape = heads, size or array.shape[-2], array.shape[-1]
        return jax.lax.dynamic_slice(array_RMP, (row * heads, start, 0), shape)

    return {name: take(array) for name, array in cache.items()}


def write_row(cache: Cache, row, start, part: Cache) -> Cache:
    """`cache` with a part that `read_row` took, perhaps of another batch and capacity.

    Args: as of `read_row`.
    """

    def put(array, part_GSP):
        array_RMP = array if array.ndim == 3 else array[None]
        at = row * part_GSP.shape[0], start, 0
        array_RMP = jax.lax.dynamic_update_slice(array_RMP, part_GSP, at)
        return array_RMP.reshape(array.shape)

    return {name: put(array, part[name]) for name, array in cache.items()}
