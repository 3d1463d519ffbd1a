"""A choice with soft borders, where the rows that choose among blocks are trained.

Ours. A choice is not differentiable, and the loss's slope where a block is whole does
not say what it is worth: that is half-way between whole and absent, as far as the loss
is a parabola in its share. So within `within` all blocks of the chosen parents are
computed, each with a share that rises from 0 to 1 around the border of the K best: only
blocks at the border are partly there, and these are the ones whose place is in doubt.
"""

import contextvars
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.kernels.native import while_wanted

WIDTH = 0.25  # of the border, in natural logarithms of the values that blocks have
_wanted = contextvars.ContextVar("moe_edge_soft_choice", default=False)


def within(function: Callable) -> Callable:
    """A function whose choices among blocks are soft wherever it is traced."""
    return while_wanted(_wanted, function)


def is_wanted() -> bool:
    """Whether this is traced within `within`."""
    return _wanted.get()


def soft_shares(value_TB: jax.Array, k: int) -> jax.Array:
    """Shares `[T, B]`, 1/2 half-way between the k-th and the next best value.

    Args:
      value_TB: float32, not negative, by which blocks are chosen.
      k: how many are; all of them: every share is 1.
    """
    if k == value_TB.shape[1]:
        return jnp.ones_like(value_TB)
    logs_TB = jnp.log(jnp.maximum(value_TB, np.finfo(np.float32).tiny))
    best_TK, _ = jax.lax.top_k(logs_TB, k + 1)
    border_T1 = best_TK[:, k - 1 :].mean(axis=1, keepdims=True)
    return jax.nn.sigmoid((logs_TB - border_T1) / WIDTH)
