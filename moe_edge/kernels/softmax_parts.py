"""A softmax's weighted sums on their way: parts of them, joined in a Triton kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

HIDDEN = -1e30  # a finite minus infinity


class Softmax(NamedTuple):
    """Weighted sums on their way, C side by side."""

    top_C: jax.Array  # largest score
    total_C: jax.Array  # sum of exp(score - top)
    sum_CP: jax.Array  # of the values, by these weights

    @classmethod
    def empty(cls, count: int, width: int) -> "Softmax":
        shapes = ((count,), HIDDEN), ((count,), 0.0), ((count, width), 0.0)
        return cls(*(jnp.full(*each, dtype=jnp.float32) for each in shapes))

    def joined(self, other: "Softmax") -> "Softmax":
        """Each with its counterpart; a hidden one with a total of 0 changes nothing."""
        top_C = jnp.maximum(self.top_C, other.top_C)
        old_C, new_C = jnp.exp(self.top_C - top_C), jnp.exp(other.top_C - top_C)
        total_C = self.total_C * old_C + other.total_C * new_C
        sum_CP = self.sum_CP * old_C[:, None] + other.sum_CP * new_C[:, None]
        return Softmax(top_C, total_C, sum_CP)

    def whole(self) -> "Softmax":
        """All of them as one."""
        top_1 = jnp.max(self.top_C, axis=0, keepdims=True)
        factor_C = jnp.exp(self.top_C - top_1)
        total_1 = jnp.sum(self.total_C * factor_C, axis=0, keepdims=True)
        sum_CP = self.sum_CP * factor_C[:, None]
        return Softmax(top_1, total_1, jnp.sum(sum_CP, axis=0, keepdims=True))
