"""A gradient for the choice among blocks, where the rows that choose are trained.

Ours. A choice is not differentiable. Within `within` a chosen block's weight is
multiplied by p / p, whose value is 1 and whose gradient is that of log p: p is the
block's share of the values by which blocks are chosen. So a block whose output lowers
the loss gains on all others, chosen or not, and nothing that is computed changes.
"""

import contextvars
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.kernels.native import while_wanted

_wanted = contextvars.ContextVar("moe_edge_choice_gradient", default=False)


def within(function: Callable) -> Callable:
    """A function whose choices have a gradient wherever it is traced."""
    return while_wanted(_wanted, function)


def choice_factors(value_TB: jax.Array, chosen_TK: jax.Array) -> jax.Array | None:
    """Ones `[T, K]` with the gradient of the choice; None outside of `within`.

    Args:
      value_TB: float32, not negative, by which blocks are chosen.
      chosen_TK: int32, the chosen columns.
    """
    if not _wanted.get():
        return None
    logs_TB = jnp.log(jnp.maximum(value_TB, np.finfo(np.float32).tiny))
    log_TB = jax.nn.log_softmax(logs_TB, axis=-1)
    log_TK = jnp.take_along_axis(log_TB, chosen_TK, axis=1)
    return jnp.exp(log_TK - jax.lax.stop_gradient(log_TK))
