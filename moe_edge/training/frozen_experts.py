"""Routed experts whose weights stay as they are: gradients of inputs and weights only.

As `expert_grad`, on records in any stored dtype, with any activation and with biases.
No gradient of a record exists, and no float32 copy of all records: the backward pass
gathers and widens a block's matrices again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.model.config import ModelConfig
from moe_edge.model.layers import activate
from moe_edge.model.matvec import einsum, to_float32
from moe_edge.model.record import RecordLayout
from moe_edge.training.expert_grad import block_size, lay_out, sum_pairs, take_rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def frozen_experts(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts_ER: jax.Array,
    layout: RecordLayout,
    activation: tuple[str, float | None],
) -> jax.Array:
    """Sums the chosen experts of every token with their weights.

    Args:
      x_TD: float32 (tokens, width).
      ids_TK: int32 (tokens, chosen), all below E.
      weights_TK: float32 (tokens, chosen).
      experts_ER: records; float32, bfloat16 or uint16 with bfloat16 bits.
      layout: where the parts stand in a record (static).
      activation: its kind and its limit, as `layers.activate` takes them (static).
    Returns:
      float32 (tokens, width); differentiable in x_TD and weights_TK.
    """
    return _forward(x_TD, ids_TK, weights_TK, experts_ER, layout, activation)[0]


def _matrices(experts_ER, expert_N, layout: RecordLayout):
    """Of each block: gate and up [N, 2F, D], down [N, D, F], biases [N, 2F + D]."""
    D, F = layout.d_model, layout.expert_dim

    def load(first, *shape):
        part_ER = experts_ER[:, first : first + np.prod(shape)]
        return to_float32(take_rows(part_ER, expert_N)).reshape(-1, *shape)

    biases_NG = load(3 * F * D, 2 * F + D) if layout.has_bias else None
    return load(0, 2 * F, D), load(2 * F * D, D, F), biases_NG


def _forward(x_TD, ids_TK, weights_TK, experts_ER, layout, activation):
    (E, _), D, F = experts_ER.shape, layout.d_model, layout.expert_dim
    size = block_size(ids_TK.size, E)
    where = lay_out(ids_TK, E, size)
    both_NGD, down_NDF, biases_NG = _matrices(experts_ER, where.expert_N, layout)
    x_NCD = take_rows(x_TD, where.token_P).reshape(-1, size, D)
    hidden_NCG = einsum("NCD,NGD->NCG", x_NCD, both_NGD)
    if biases_NG is not None:
        hidden_NCG = hidden_NCG + biases_NG[:, None, : 2 * F]
    weight_P = jnp.zeros(where.token_P.shape, jnp.float32)
    weight_P = weight_P.at[where.row_TK].set(weights_TK, unique_indices=True)
    weight_NC1 = weight_P.reshape(-1, size, 1)  # 0 for padding
    act_NCF = activate(hidden_NCG[..., :F], hidden_NCG[..., F:], *activation)
    out_NCD = einsum("NCF,NDF->NCD", act_NCF * weight_NC1, down_NDF)
    if biases_NG is not None:
        out_NCD = out_NCD + weight_NC1 * biases_NG[:, None, 2 * F :]
    y_TD = sum_pairs(out_NCD.reshape(-1, D), where.row_TK)
    return y_TD, (experts_ER, hidden_NCG, weight_NC1, where)


def _backward(layout, activation, saved, dy_TD):
    experts_ER, hidden_NCG, weight_NC1, where = saved
    D, F, size = layout.d_model, layout.expert_dim, hidden_NCG.shape[1]
    both_NGD, down_NDF, biases_NG = _matrices(experts_ER, where.expert_N, layout)
    dy_NCD = take_rows(dy_TD, where.token_P).reshape(-1, size, D)

    def act(hidden_NCG):
        return activate(hidden_NCG[..., :F], hidden_NCG[..., F:], *activation)

    act_NCF, act_vjp = jax.vjp(act, hidden_NCG)
    dweighted_NCF = einsum("NCD,NDF->NCF", dy_NCD, down_NDF)
    dweight_NC = (dweighted_NCF * act_NCF).sum(axis=-1)
    if biases_NG is not None:
        dweight_NC = dweight_NC + einsum("NCD,ND->NC", dy_NCD, biases_NG[:, 2 * F :])
    (dhidden_NCG,) = act_vjp(dweighted_NCF * weight_NC1)
    dx_NCD = einsum("NCG,NGD->NCD", dhidden_NCG, both_NGD)
    return (
        sum_pairs(dx_NCD.reshape(-1, D), where.row_TK),
        np.zeros(where.row_TK.shape, jax.dtypes.float0),
        take_rows(dweight_NC.reshape(-1), where.row_TK),
        None,  # the records: no gradient
    )


frozen_experts.defvjp(_forward, _backward)


def frozen_expert_fn(config: ModelConfig):
    """The function a block calls with (x_TD, ids_TK, weights_TK, experts_ER)."""
    layout = RecordLayout.of(config)
    activation = (config.moe.activation, config.moe.swiglu_limit)

    def run(x_TD, ids_TK, weights_TK, experts_ER):
        return frozen_experts(x_TD, ids_TK, weights_TK, experts_ER, layout, activation)

    return run
