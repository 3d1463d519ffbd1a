"""The proxy gate: which sub-experts of the chosen parents compute a token.

MoE-Prism, section 4.3.1 (no training): the parent router stays, and the activations of
a few gate neurons, the most central of each sub-expert, stand for the sub-expert's own.
They are dense weights, so a block may be absent while it is judged.

A pattern says how many blocks the 1st, 2nd, ... parent runs (the paper's); it follows
from mean shares for any K. The global rule ranks all blocks of the chosen parents; the
calibrated gate (`calibrated_gate.py`) does, too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.float32 import to_float32
from moe_edge.model.config import MoeConfig
from moe_edge.model.layers import activate
from moe_edge.model.matvec import einsum, linear
from moe_edge.model.soft_choice import is_wanted, soft_shares


def pattern_counts(moe: MoeConfig) -> tuple[int, ...]:
    """Blocks that the parent of each rank runs: the K largest mean shares.

    A row of `rank_shares` never rises, so a parent's first blocks come first; ties go
    to the better rank.
    """
    best_K = _best_shares(moe)
    counts_P = np.bincount(best_K // moe.sub_experts, minlength=moe.parent_top_k)
    return tuple(counts_P.tolist())


def _best_shares(moe: MoeConfig) -> np.ndarray:
    """Of the parents' blocks, numbered rank by rank, the K best in order of share."""
    shares_PU = np.minimum.accumulate(np.asarray(moe.rank_shares), axis=1)
    return np.argsort(-shares_PU, axis=None, kind="stable")[: moe.top_k]


def block_ranks(moe: MoeConfig) -> np.ndarray:
    """int32 `[K]`: a smaller K computes those of `choose_blocks` ranked below it."""
    if moe.gate == "proxy_pattern":
        return np.argsort(_best_shares(moe)).astype(np.int32)  # by rank of parents
    if is_wanted():  # all blocks of the parents, but for padding
        return np.zeros(moe.parent_top_k * moe.sub_experts, np.int32)
    return np.arange(moe.top_k, dtype=np.int32)


class GateNeurons(NamedTuple):
    """A layer's gate neurons, block by block: N = E * U * r."""

    gate_ND: jax.Array  # stored rows of gate and up
    up_ND: jax.Array
    gate_bias_N: jax.Array | None
    up_bias_N: jax.Array | None
    scale_N: jax.Array  # float32; the paper's gate has 1
    prior_B: jax.Array  # float32 [E * U]; the paper's gate has 0


# Tokens up to which the rows of each token's own parents are gathered: beyond, one
# product with all gate neurons is faster than copies of many rows.
GATHERED_TOKENS = 8


def block_levels(
    x_TD: jax.Array, parents_TP: jax.Array, neurons: GateNeurons, moe: MoeConfig
) -> jax.Array:
    """How active each block of the chosen parents should be: float32 `[T, P, U]` >= 0.

    The mean of |activation| x scale of its gate neurons, plus its prior: with scale 1
    and prior 0 the paper's score, else the estimate that `moe-edge refactor` fitted.

    Args:
      x_TD: float32, the state that the router sees.
      parents_TP: int32, the chosen parents.
      neurons: of the layer.
      moe: of the refactored model.
    """
    E, U, r = moe.num_parents, moe.sub_experts, moe.gate_neurons
    D, is_few = x_TD.shape[1], x_TD.shape[0] <= GATHERED_TOKENS

    def project(rows_ND, bias_N):
        """Pre-activations `[T, P, U * r]`."""
        if is_few:
            rows_TPND = to_float32(rows_ND.reshape(E, U * r, D)[parents_TP])
            y_TPN = einsum("td,tpnd->tpn", x_TD, rows_TPND)
        else:
            y_TEN = linear(x_TD, rows_ND).reshape(-1, E, U * r)
            y_TPN = jnp.take_along_axis(y_TEN, parents_TP[..., None], axis=1)
        if bias_N is None:
            return y_TPN
        return y_TPN + bias_N.astype(jnp.float32).reshape(E, U * r)[parents_TP]

    gate_TPN = project(neurons.gate_ND, neurons.gate_bias_N)
    up_TPN = project(neurons.up_ND, neurons.up_bias_N)
    level_TPN = jnp.abs(activate(gate_TPN, up_TPN, moe.activation, moe.swiglu_limit))
    level_TPN = level_TPN * neurons.scale_N.reshape(E, U * r)[parents_TP]
    level_TPU = level_TPN.reshape(*parents_TP.shape, U, r).mean(axis=-1)
    return jnp.maximum(level_TPU + neurons.prior_B.reshape(E, U)[parents_TP], 0.0)


def choose_blocks(
    parents_TP: jax.Array, weights_TP: jax.Array, levels_TPU: jax.Array, moe: MoeConfig
) -> tuple[jax.Array, jax.Array]:
    """Blocks of the chosen parents, best first, and their weights.

    Args:
      parents_TP: int32, best first.
      weights_TP: as multiplied onto the parents' outputs; a block takes its parent's.
      levels_TPU: from `block_levels`.
      moe: of the refactored model; `top_k` blocks are chosen.
    Returns:
      (ids_TK, weights_TK); ties go to the better parent, then to the lower block. Where
      the choice is soft (`soft_choice`), all blocks of the chosen parents.
    """
    T, P = parents_TP.shape
    U = moe.sub_experts
    if moe.gate != "proxy_pattern":
        value_TB = (weights_TP[..., None] * levels_TPU).reshape(T, P * U)
        if is_wanted():
            share_TB = soft_shares(value_TB, moe.top_k)
            ids_TPU = parents_TP[..., None] * U + np.arange(U, dtype=np.int32).reshape(
                1, 1, U
            )
            weights_TB = jnp.repeat(weights_TP, U, axis=1) * share_TB
            return ids_TPU.reshape(T, -1), weights_TB
        _, chosen_TK = jax.lax.top_k(value_TB, moe.top_k)
        rank_TK, sub_TK = chosen_TK // U, chosen_TK % U
    else:
        rank_K, position_K = np.nonzero(
            np.arange(U)[None, :] < np.asarray(pattern_counts(moe))[:, None]
        )
        _, order_TPU = jax.lax.top_k(levels_TPU, U)
        sub_TK = order_TPU[:, rank_K, position_K]
        rank_TK = jnp.broadcast_to(rank_K.astype(np.int32)[None], sub_TK.shape)
    parent_TK = jnp.take_along_axis(parents_TP, rank_TK, axis=1)
    weights_TK = jnp.take_along_axis(weights_TP, rank_TK, axis=1)
    return parent_TK * U + sub_TK, weights_TK
