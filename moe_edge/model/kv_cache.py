"""The key/value cache of one layer: preallocated, written in place by donation.

A cache is a plain dict of arrays with a fixed capacity M, so that a step keeps
one shape while the sequence grows. Grouped-query attention holds `k` and `v`
`[B, G, M, P]`; latent attention holds `latent` `[B, 1, M, R_kv + rope]`. Row b's
tokens stand at positions 0, 1, ...; what lies beyond a row's length is garbage
that the causal mask hides until it is overwritten.
"""

import jax
import jax.numpy as jnp

from moe_edge.model.config import ModelConfig

Cache = dict[str, jax.Array]


def cache_shapes(config: ModelConfig, batch: int, capacity: int) -> dict[str, tuple]:
    """Array name -> shape of one layer's cache."""
    attention = config.attention
    if attention.kind == "mla":
        width = attention.kv_lora_rank + attention.rope.dim
        return {"latent": (batch, 1, capacity, width)}
    shape = (batch, attention.num_kv_heads, capacity, attention.head_dim)
    return {"k": shape, "v": shape}


def empty_cache(config: ModelConfig, batch: int, capacity: int) -> Cache:
    """A zeroed float32 cache of one layer."""
    shapes = cache_shapes(config, batch, capacity)
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}


def write(cache_BGMP: jax.Array, new_BGSP: jax.Array, start_B: jax.Array) -> jax.Array:
    """Puts `new` at positions start_B[b] .. start_B[b] + S - 1 of each row.

    The caller sees to it that start + S <= M (XLA would shift the write silently).
    """
    if cache_BGMP.shape[0] == 1:
        at = (0, 0, start_B[0], 0)
        return jax.lax.dynamic_update_slice(cache_BGMP, new_BGSP, at)
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, at))
    zeros = jnp.zeros_like(start_B)
    return put(cache_BGMP, new_BGSP, (zeros, start_B, zeros))


def visible(start_B, num_queries: int, num_keys: int, window) -> jax.Array:
    """Which keys each query sees, bool `[B, S, M]`.

    Args:
      start_B: position of the first query of each row.
      window: int32 scalar, how many latest positions a query sees.
    """
    queries = start_B[:, None, None] + jnp.arange(num_queries).reshape(1, -1, 1)
    keys = jnp.arange(num_keys).reshape(1, 1, -1)
    return (keys <= queries) & (keys > queries - window)
