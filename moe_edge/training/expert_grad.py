"""Routed experts for training: dropless, and differentiable with a hand-written VJP.

The (token, chosen expert) pairs are laid out in blocks of one expert each; a block is
`size` rows, the last block of an expert is padded. Blocks then meet a gathered copy of
their expert's matrices in one batched product. There are at most T*K/size + E blocks
whatever the routing, so shapes are static and no pair is ever dropped.

Nothing here sorts: a pair's row follows from a running count of its expert, which a
triangular product gives faster than `argsort` does on CPU. The VJP saves the hidden
layer before its activation and reads rows by index where autodiff would scatter.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.model.record import RecordLayout

MAX_BLOCK = 256  # rows: larger pads more, smaller multiplies slower
_CHUNK = 128  # tokens whose running counts come from one triangular product
_IN_BOUNDS = "promise_in_bounds"


class Layout(NamedTuple):
    """Where every pair stands. P = blocks * size rows, N = blocks."""

    row_TK: jax.Array  # int32, row of a pair
    token_P: jax.Array  # int32, token of a row (0 for padding)
    expert_N: jax.Array  # int32, expert of a block


def block_size(pairs: int, experts: int) -> int:
    """Rows of a block: about a quarter of an expert's mean, so padding is ~12 %."""
    size = 8
    while size < MAX_BLOCK and size * 8 <= pairs // experts:
        size *= 2
    return size


def lay_out(ids_TK: jax.Array, experts: int, size: int) -> Layout:
    """Gives every pair a row so that each block belongs to one expert."""
    T, K = ids_TK.shape
    token_TK = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], (T, K))
    chosen_TE = jnp.zeros((T, experts), jnp.float32).at[token_TK, ids_TK].add(1.0)
    before_TE = _count_before(chosen_TE)
    counts_E = chosen_TE.sum(axis=0).astype(jnp.int32)
    blocks_E = (counts_E + size - 1) // size
    last_E = jnp.cumsum(blocks_E)
    rank_TK = jnp.take_along_axis(before_TE, ids_TK, axis=1).astype(jnp.int32)
    row_TK = (last_E - blocks_E)[ids_TK] * size + rank_TK
    num_blocks = -(-T * K // size) + experts
    token_P = jnp.zeros(num_blocks * size, jnp.int32)
    token_P = token_P.at[row_TK].set(token_TK, mode=_IN_BOUNDS, unique_indices=True)
    block_N = jnp.arange(num_blocks, dtype=jnp.int32)
    expert_N = (block_N[:, None] >= last_E[None]).sum(axis=1, dtype=jnp.int32)
    return Layout(row_TK, token_P, jnp.minimum(expert_N, experts - 1))


def _count_before(chosen_TE: jax.Array) -> jax.Array:
    """Exclusive running sum over tokens; exact, as counts stay below 2**24."""
    T, E = chosen_TE.shape
    chunks = -(-T // _CHUNK)
    padded_TE = jnp.pad(chosen_TE, ((0, chunks * _CHUNK - T), (0, 0)))
    chosen_CSE = padded_TE.reshape(chunks, _CHUNK, E)
    lower_SS = np.tril(np.ones((_CHUNK, _CHUNK), np.float32), -1)
    within_CSE = jnp.einsum("st,cte->cse", lower_SS, chosen_CSE)
    total_CE = chosen_CSE.sum(axis=1)
    start_CE = jnp.cumsum(total_CE, axis=0) - total_CE
    return (within_CSE + start_CE[:, None]).reshape(-1, E)[:T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def train_experts(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts_ER: jax.Array,
    layout: RecordLayout,
) -> jax.Array:
    """Sums the chosen experts of every token with their weights (SiLU, no biases).

    Args:
      x_TD: float32 (tokens, width).
      ids_TK: int32 (tokens, chosen), all below E.
      weights_TK: float32 (tokens, chosen).
      experts_ER: float32 records.
      layout: where the parts stand in a record (static).
    Returns:
      float32 (tokens, width); differentiable in x_TD, weights_TK and experts_ER.
    """
    return _forward(x_TD, ids_TK, weights_TK, experts_ER, layout)[0]


def take_rows(x_TI, index):
    return x_TI.at[index].get(mode=_IN_BOUNDS)


def sum_pairs(out_PD, row_TK):
    """Adds the K rows of every token; a sum of gathers fuses into one loop."""
    total_TD = take_rows(out_PD, row_TK[:, 0])
    for k in range(1, row_TK.shape[1]):
        total_TD += take_rows(out_PD, row_TK[:, k])
    return total_TD


def _matrices(experts_ER, expert_N, layout):
    """Each block's gate and up [N, 2F, D], neighbours in the record; down [N, D, F]."""
    D, F = layout.d_model, layout.expert_dim
    both_NGD = take_rows(experts_ER[:, : 2 * F * D], expert_N).reshape(-1, 2 * F, D)
    down_ED = experts_ER[:, 2 * F * D : 3 * F * D]
    return both_NGD, take_rows(down_ED, expert_N).reshape(-1, D, F)


def _forward(x_TD, ids_TK, weights_TK, experts_ER, layout):
    E, F = experts_ER.shape[0], layout.expert_dim
    size = block_size(ids_TK.size, E)
    where = lay_out(ids_TK, E, size)
    both_NGD, down_NDF = _matrices(experts_ER, where.expert_N, layout)
    x_NCD = take_rows(x_TD, where.token_P).reshape(-1, size, x_TD.shape[1])
    hidden_NCG = jnp.einsum("NCD,NGD->NCG", x_NCD, both_NGD)
    weight_P = jnp.zeros(where.token_P.shape, jnp.float32)
    weight_P = weight_P.at[where.row_TK].set(
        weights_TK, mode=_IN_BOUNDS, unique_indices=True
    )
    weight_NC1 = weight_P.reshape(-1, size, 1)  # 0 for padding
    gate_NCF, up_NCF = hidden_NCG[..., :F], hidden_NCG[..., F:]
    # Weighting the narrow hidden layer is cheaper than weighting the output.
    act_NCF = jax.nn.silu(gate_NCF) * up_NCF * weight_NC1
    out_NCD = jnp.einsum("NCF,NDF->NCD", act_NCF, down_NDF)
    y_TD = sum_pairs(out_NCD.reshape(-1, x_TD.shape[1]), where.row_TK)
    return y_TD, (x_TD, experts_ER, hidden_NCG, weight_NC1, where)


def _backward(layout, saved, dy_TD):
    x_TD, experts_ER, hidden_NCG, weight_NC1, where = saved
    (E, R), F, D = experts_ER.shape, layout.expert_dim, layout.d_model
    size = hidden_NCG.shape[1]
    both_NGD, down_NDF = _matrices(experts_ER, where.expert_N, layout)
    x_NCD = take_rows(x_TD, where.token_P).reshape(-1, size, D)
    dy_NCD = take_rows(dy_TD, where.token_P).reshape(-1, size, D)

    gate_NCF, up_NCF = hidden_NCG[..., :F], hidden_NCG[..., F:]
    sigmoid_NCF = jax.nn.sigmoid(gate_NCF)
    silu_NCF = gate_NCF * sigmoid_NCF
    act_NCF = silu_NCF * up_NCF
    dweighted_NCF = jnp.einsum("NCD,NDF->NCF", dy_NCD, down_NDF)
    ddown_NDF = jnp.einsum("NCD,NCF->NDF", dy_NCD, act_NCF * weight_NC1)
    dweight_P = (dweighted_NCF * act_NCF).sum(axis=-1).reshape(-1)

    dact_NCF = dweighted_NCF * weight_NC1
    dsilu_NCF = sigmoid_NCF + silu_NCF * (1.0 - sigmoid_NCF)
    dhidden_NCG = jnp.concatenate(
        [dact_NCF * up_NCF * dsilu_NCF, dact_NCF * silu_NCF], axis=-1
    )
    dboth_NGD = jnp.einsum("NCG,NCD->NGD", dhidden_NCG, x_NCD)
    dx_NCD = jnp.einsum("NCG,NGD->NCD", dhidden_NCG, both_NGD)

    def per_expert(d_N):
        return jax.ops.segment_sum(
            d_N.reshape(d_N.shape[0], -1), where.expert_N, E, indices_are_sorted=True
        )

    parts = [per_expert(dboth_NGD), per_expert(ddown_NDF)]
    if padding := R - 3 * F * D:
        parts.append(jnp.zeros((E, padding), jnp.float32))
    dids_TK = np.zeros(where.row_TK.shape, jax.dtypes.float0)
    return (
        sum_pairs(dx_NCD.reshape(-1, D), where.row_TK),
        dids_TK,
        take_rows(dweight_P, where.row_TK),
        jnp.concatenate(parts, axis=1),
    )


train_experts.defvjp(_forward, _backward)


def expert_fn(layout: RecordLayout):
    """The function a block calls with (x_TD, ids_TK, weights_TK, experts_ER)."""

    def run(x_TD, ids_TK, weights_TK, experts_ER):
        return train_experts(x_TD, ids_TK, weights_TK, experts_ER, layout)

    return run
