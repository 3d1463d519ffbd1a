"""Inside the kernel of a step's attention: heads of q, k and v from their products.

A head is loaded column by column beside the columns that they turn with: Triton cannot
move what it holds, memory can.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


class Heads(NamedTuple):
    """Those of a row; see `decode_attention.attend` for what `refs` name."""

    refs: dict
    attention: object  # an `AttentionConfig`
    eps: float
    row: jax.Array

    def rotated(self, name: str, heads, columns_P) -> list[jax.Array]:
        """Some heads of q or k, float32 `[P']` each: normed, clipped, rotated."""
        scale = self._full_scale(name)
        return [self._rotated(name, head, columns_P, scale) for head in heads]

    def _load(self, name: str, at_N, known_N):
        """Of the row's product `name`, with its bias."""
        at = jnp.full_like(at_N, self.row), at_N
        y_N = triton.load(self.refs[name].at[at], mask=known_N, other=0.0)
        return y_N + self._vector(f"{name}_bias", at_N, known_N, 0.0)

    def _vector(self, name: str, at_N, known_N, default: float):
        if name not in self.refs:
            return default
        found_N = triton.load(self.refs[name].at[at_N], mask=known_N, other=0.0)
        return found_N.astype(jnp.float32)

    def _full_scale(self, name: str):
        """What a norm over the whole product multiplies it by; None without one."""
        if self.attention.qk_norm != "full":
            return None
        size = self.refs[name].shape[1]
        at_N = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
        y_N = self._load(name, at_N, at_N < size)
        return lax.rsqrt(jnp.sum(y_N * y_N) / size + self.eps)

    def plain(self, name: str, head, columns_P, scale=None) -> jax.Array:
        """Columns of a head before it is rotated.

        Args:
          columns_P: int32, inside the head; 0 stands for those beyond its width.
          scale: of a norm over the whole product, None without one.
        """
        attention = self.attention
        known_P = columns_P < attention.head_dim
        at_P = head * attention.head_dim + columns_P
        y_P = self._load(name, at_P, known_P)
        if scale is not None:
            y_P = y_P * scale * self._vector(f"{name}_norm", at_P, known_P, 1.0)
        if attention.clip_qkv is not None:
            y_P = jnp.clip(y_P, -attention.clip_qkv, attention.clip_qkv)
        return y_P

    def _rotated(self, name: str, head, columns_P, scale):
        """A head of q or k: each column with the one that it turns with."""
        attention, half = self.attention, self.refs["cos"].shape[1]
        pair_P, sign_P = _turn(columns_P, half, attention.rope.interleaved)
        is_turned_P = columns_P < 2 * half
        both = [self.plain(name, head, at_P, scale) for at_P in (columns_P, pair_P)]
        by_head = attention.qk_norm == "head"
        if by_head and not attention.qk_norm_after_rope:
            scale = self._head_scale(both[0])
            for index, at_P in enumerate((columns_P, pair_P)):
                both[index] = self._normed(both[index], name, at_P, scale)
        at_P = columns_P >> 1
        if not attention.rope.interleaved:
            at_P = jnp.where(columns_P < half, columns_P, columns_P - half)
        at = jnp.full_like(at_P, self.row), at_P
        cos_P, sin_P = (
            triton.load(self.refs[table].at[at], mask=is_turned_P, other=other)
            for table, other in (("cos", 1.0), ("sin", 0.0))
        )
        turned_P = both[0] * cos_P + both[1] * (sin_P * sign_P)
        if by_head and attention.qk_norm_after_rope:
            scale = self._head_scale(turned_P)
            turned_P = self._normed(turned_P, name, columns_P, scale)
        return turned_P

    def _head_scale(self, head_P):
        """What a norm of one head multiplies it by."""
        squares = jnp.sum(head_P * head_P)
        return lax.rsqrt(squares / self.attention.head_dim + self.eps)

    def _normed(self, y_P, name: str, at_P, scale):
        """Columns of a head times the scale of its norm and the norm's weights."""
        known_P = at_P < self.attention.head_dim
        return y_P * scale * self._vector(f"{name}_norm", at_P, known_P, 1.0)


def _turn(columns_P, half: int, interleaved: bool):
    """The column that each turns with, and the sign of its sine."""
    if interleaved:
        pair_P, is_first_P = columns_P ^ 1, (columns_P & 1) == 0
    else:
        is_first_P = columns_P < half
        pair_P = jnp.where(is_first_P, columns_P + half, columns_P - half)
    pair_P = jnp.where(columns_P < 2 * half, pair_P, columns_P)
    return pair_P, jnp.where(is_first_P, -1.0, 1.0)
