"""Rotary position embedding: tables of angles, and the rotation."""

import jax
import jax.numpy as jnp

from moe_edge.model.attention_config import RopeConfig
from moe_edge.model.rope_frequencies import inverse_frequencies


def rope_tables(rope: RopeConfig, positions_BS: jax.Array) -> tuple[jax.Array, ...]:
    """Cosines and sines of every position, float32 `[B, S, dim / 2]` each."""
    frequencies = jnp.asarray(inverse_frequencies(rope)).reshape(1, 1, -1)
    angles = positions_BS.astype(jnp.float32)[..., None] * frequencies
    factor = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x_BSHP: jax.Array, tables, interleaved: bool) -> jax.Array:
    """Rotates the first `dim` of the last axis by the tables of its position.

    Pairs are (i, i + dim / 2), or (2i, 2i + 1) when interleaved.
    """
    cos, sin = (table[:, :, None, :] for table in tables)
    half = cos.shape[-1]
    turned, rest = x_BSHP[..., : 2 * half], x_BSHP[..., 2 * half :]
    if interleaved:
        pairs = turned.reshape(*turned.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = turned[..., :half], turned[..., half:]
    new_first = first * cos - second * sin
    new_second = second * cos + first * sin
    if interleaved:
        turned = jnp.stack([new_first, new_second], -1).reshape(turned.shape)
    else:
        turned = jnp.concatenate([new_first, new_second], -1)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned
