"""The calibrated gate: which sub-experts of the chosen parents compute a token.

Ours. The parent router stays, and a row for each sub-expert predicts the logarithm of
its norm from the hidden state (`moe-edge refactor` fits the rows). A product
of a row costs a third of a gate neuron's, and with all blocks on the model is its
parent, for the rows only choose.
"""

import jax
import jax.numpy as jnp

from moe_edge.core.float32 import to_float32
from moe_edge.model.config import MoeConfig
from moe_edge.model.matvec import einsum, linear
from moe_edge.model.proxy_gate import GATHERED_TOKENS

MOST = 60.0  # of a predicted logarithm, either way: its exponential stays finite


def predicted_levels(
    x_TD: jax.Array,
    parents_TP: jax.Array,
    weight_BD: jax.Array,
    bias_B: jax.Array,
    moe: MoeConfig,
) -> jax.Array:
    """Norm that each block of the chosen parents should have: float32 `[T, P, U]`.

    Args:
      x_TD: float32, the state that the router sees.
      parents_TP: int32, the chosen parents.
      weight_BD: stored rows, block by block; bias_B: float32.
      moe: of the refactored model.
    """
    E, U, D = moe.num_parents, moe.sub_experts, x_TD.shape[1]
    if x_TD.shape[0] <= GATHERED_TOKENS:
        rows_TPUD = to_float32(weight_BD.reshape(E, U, D)[parents_TP])
        logs_TPU = einsum("td,tpud->tpu", x_TD, rows_TPUD)
    else:
        logs_TEU = linear(x_TD, weight_BD).reshape(-1, E, U)
        logs_TPU = jnp.take_along_axis(logs_TEU, parents_TP[..., None], axis=1)
    logs_TPU += bias_B.astype(jnp.float32).reshape(E, U)[parents_TP]
    return jnp.exp(jnp.clip(logs_TPU, -MOST, MOST))
