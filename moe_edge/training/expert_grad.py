"""Routed experts for training: dropless, and differentiable with a hand-written VJP.

The (token, chosen expert) pairs are laid out in blocks of one expert each; a block is
`size` rows, the last block of an expert is padded. There are at most T*K/size + E
blocks whatever the routing, so shapes are static and no pair is ever dropped. A loop
takes the blocks in use in waves of `WAVE`, which share a batched product: enough for
two cores, and a wave's matrices, rows and gradients stay in the cache, where one
product over all blocks would first write a copy of the matrices for every block
(measured: docs/measurements.md).

Nothing here sorts: a pair's row follows from a running count of its expert, which a
triangular product gives faster than `argsort` does on CPU. The VJP saves the hidden
layer before its activation and reads rows by index where autodiff would scatter.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_edge.core.float32 import to_float32
from moe_edge.kernels import gradients
from moe_edge.model.config import ModelConfig
from moe_edge.model.layers import activate
from moe_edge.model.matvec import einsum
from moe_edge.model.record import RecordLayout

MAX_BLOCK = 256  # rows: larger pads more, smaller multiplies slower
WAVE = 8  # blocks of one product
_CHUNK = 128  # tokens whose running counts come from one triangular product
_IN_BOUNDS = "promise_in_bounds"


class Kernel(NamedTuple):
    """What is static in the experts' computation.

    Attributes:
      layout: where the parts stand in a record.
      activation: its kind and its limit, as `layers.activate` takes them.
      frozen: the records have no gradient. They may then be stored in any dtype: no
        float32 copy of all of them is made, a block's matrices are widened.
    """

    layout: RecordLayout
    activation: tuple[str, float | None] = ("silu", None)
    frozen: bool = False


class Layout(NamedTuple):
    """Where every pair stands: N blocks of C rows, in waves of W."""

    row_TK: jax.Array  # int32, row of a pair
    token_NC: jax.Array  # int32, token of a row (0 for padding)
    expert_N: jax.Array  # int32, expert of a block
    waves: jax.Array  # int32, waves whose blocks have rows: the first ones


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
    num_blocks = -(-(-(-T * K // size) + experts) // WAVE) * WAVE
    token_NC = _set_rows(jnp.zeros((num_blocks, size), jnp.int32), row_TK, token_TK)
    block_N = jnp.arange(num_blocks, dtype=jnp.int32)
    expert_N = (block_N[:, None] >= last_E[None]).sum(axis=1, dtype=jnp.int32)
    expert_N = jnp.minimum(expert_N, experts - 1)
    return Layout(row_TK, token_NC, expert_N, (last_E[-1] + WAVE - 1) // WAVE)


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


def _set_rows(array_NC, row_TK, values_TK):
    """The array with a value at every pair's row."""
    flat_P = array_NC.reshape(-1).at[row_TK]
    flat_P = flat_P.set(values_TK, mode=_IN_BOUNDS, unique_indices=True)
    return flat_P.reshape(array_NC.shape)


def _take_rows(x_TI, index):
    return x_TI.at[index].get(mode=_IN_BOUNDS)


def _sum_pairs(out_NCD, row_TK):
    """Adds the K rows of every token; a sum of gathers fuses into one loop."""
    out_PD = out_NCD.reshape(-1, out_NCD.shape[-1])
    total_TD = _take_rows(out_PD, row_TK[:, 0])
    for k in range(1, row_TK.shape[1]):
        total_TD += _take_rows(out_PD, row_TK[:, k])
    return total_TD


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def train_experts(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts_ER: jax.Array,
    kernel: Kernel,
) -> jax.Array:
    """Sums the chosen experts of every token with their weights.

    Args:
      x_TD: float32 (tokens, width).
      ids_TK: int32 (tokens, chosen), all below E.
      weights_TK: float32 (tokens, chosen).
      experts_ER: records; float32, or if frozen also bfloat16 or uint16 with its bits.
      kernel: what is static.
    Returns:
      float32 (tokens, width); differentiable in x_TD, weights_TK and, unless they are
      frozen, experts_ER.
    """
    return _forward(x_TD, ids_TK, weights_TK, experts_ER, kernel)[0]


def _matrices(experts_ER, expert_W, layout: RecordLayout):
    """Of a wave: gate and up [W, 2F, D], down [W, D, F], biases [W, 1, 2F + D]."""
    D, F = layout.d_model, layout.expert_dim

    def load(first, *shape):
        part_EP = experts_ER[:, first : first + int(np.prod(shape))]
        return to_float32(_take_rows(part_EP, expert_W)).reshape(-1, *shape)

    bias_W1B = load(3 * F * D, 1, 2 * F + D) if layout.has_bias else None
    return load(0, 2 * F, D), load(2 * F * D, D, F), bias_W1B


def _get(array_N, n):
    """The n-th wave of an array of blocks."""
    return lax.dynamic_slice_in_dim(array_N, n * WAVE, WAVE)


def _put(array_N, n, value_W):
    return lax.dynamic_update_slice_in_dim(array_N, value_W, n * WAVE, axis=0)


def _wave(n, where: Layout, weight_NC):
    """Experts [W], tokens [W, C] and weights [W, C, 1] of a wave."""
    weight_WC1 = _get(weight_NC, n)[..., None]
    return _get(where.expert_N, n), _get(where.token_NC, n), weight_WC1


def _activation(kernel: Kernel):
    F = kernel.layout.expert_dim

    def act(hidden_WCG):
        return activate(hidden_WCG[..., :F], hidden_WCG[..., F:], *kernel.activation)

    return act


def _forward(x_TD, ids_TK, weights_TK, experts_ER, kernel):
    E, G, D = experts_ER.shape[0], 2 * kernel.layout.expert_dim, x_TD.shape[1]
    where = lay_out(ids_TK, E, block_size(ids_TK.size, E))
    N, C = where.token_NC.shape
    # 0 for padding. Weighting the narrow hidden layer is cheaper than the output.
    weight_NC = _set_rows(jnp.zeros((N, C), jnp.float32), where.row_TK, weights_TK)
    act = _activation(kernel)

    def run_wave(n, carry):
        hidden_NCG, out_NCD = carry
        expert_W, token_WC, weight_WC1 = _wave(n, where, weight_NC)
        both_WGD, down_WDF, bias_W1B = _matrices(experts_ER, expert_W, kernel.layout)
        hidden_WCG = einsum("WCD,WGD->WCG", _take_rows(x_TD, token_WC), both_WGD)
        if bias_W1B is not None:
            hidden_WCG += bias_W1B[..., :G]
        out_WCD = einsum("WCF,WDF->WCD", act(hidden_WCG) * weight_WC1, down_WDF)
        if bias_W1B is not None:
            out_WCD += weight_WC1 * bias_W1B[..., G:]
        return _put(hidden_NCG, n, hidden_WCG), _put(out_NCD, n, out_WCD)

    start = jnp.zeros((N, C, G), jnp.float32), jnp.zeros((N, C, D), jnp.float32)
    hidden_NCG, out_NCD = lax.fori_loop(0, where.waves, run_wave, start)
    y_TD = _sum_pairs(out_NCD, where.row_TK)
    kept_TD = None if kernel.frozen else x_TD  # only the records' gradient needs it
    return y_TD, (kept_TD, experts_ER, hidden_NCG, weight_NC, where)


def _backward(kernel, saved, dy_TD):
    x_TD, experts_ER, hidden_NCG, weight_NC, where = saved
    layout, (E, R) = kernel.layout, experts_ER.shape
    (N, C, G), D = hidden_NCG.shape, layout.d_model
    act = _activation(kernel)

    def run_wave(n, carry):
        dx_NCD, dweight_NC, dexperts_ER = carry
        expert_W, token_WC, weight_WC1 = _wave(n, where, weight_NC)
        both_WGD, down_WDF, bias_W1B = _matrices(experts_ER, expert_W, layout)
        dy_WCD = _take_rows(dy_TD, token_WC)
        act_WCF, act_vjp = jax.vjp(act, _get(hidden_NCG, n))
        dweighted_WCF = einsum("WCD,WDF->WCF", dy_WCD, down_WDF)
        dweight_WC = (dweighted_WCF * act_WCF).sum(axis=2)
        if bias_W1B is not None:
            dweight_WC += (dy_WCD * bias_W1B[..., G:]).sum(axis=2)
        (dhidden_WCG,) = act_vjp(dweighted_WCF * weight_WC1)
        dx_WCD = einsum("WCG,WGD->WCD", dhidden_WCG, both_WGD)
        if not kernel.frozen:
            parts = [
                einsum("WCG,WCD->WGD", dhidden_WCG, _take_rows(x_TD, token_WC)),
                einsum("WCD,WCF->WDF", dy_WCD, act_WCF * weight_WC1),
            ]
            if bias_W1B is not None:
                parts += [dhidden_WCG.sum(axis=1), (dy_WCD * weight_WC1).sum(axis=1)]
            parts.append(jnp.zeros((WAVE, R - layout.num_values), jnp.float32))
            parts = [part.reshape(WAVE, -1) for part in parts]
            dexperts_ER = dexperts_ER.at[expert_W].add(jnp.concatenate(parts, axis=1))
        return _put(dx_NCD, n, dx_WCD), _put(dweight_NC, n, dweight_WC), dexperts_ER

    start = (
        jnp.zeros((N, C, D), jnp.float32),
        jnp.zeros((N, C), jnp.float32),
        None if kernel.frozen else jnp.zeros((E, R), jnp.float32),
    )
    dx_NCD, dweight_NC, dexperts_ER = lax.fori_loop(0, where.waves, run_wave, start)
    return (
        _sum_pairs(dx_NCD, where.row_TK),
        np.zeros(where.row_TK.shape, jax.dtypes.float0),
        _take_rows(dweight_NC.reshape(-1), where.row_TK),
        dexperts_ER,
    )


train_experts.defvjp(_forward, _backward)


def expert_fn(config: ModelConfig, *, frozen: bool = False):
    """The function a block calls with (x_TD, ids_TK, weights_TK, experts_ER)."""
    activation = (config.moe.activation, config.moe.swiglu_limit)
    kernel = Kernel(RecordLayout.of(config), activation, frozen)

    def run(x_TD, ids_TK, weights_TK, experts_ER):
        layout = kernel.layout
        widths = layout.d_model, layout.expert_dim
        plain = kernel.activation == ("silu", None) and not layout.has_bias
        stored = {"dtype": experts_ER.dtype, "frozen": frozen}
        if plain and gradients.suits(*widths, **stored):
            given = x_TD, ids_TK, weights_TK, experts_ER
            return gradients.experts(*given, layout.expert_dim, frozen)
        return train_experts(x_TD, ids_TK, weights_TK, experts_ER, kernel)

    return run
