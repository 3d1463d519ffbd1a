"""Routed experts: the weighted sum of the chosen experts' FFNs, on flat records.

Three forms of one sum, chosen by the number of tokens (measured, see `_choose`):
`pairs` loops over (token, chosen expert), for decoding; `blocks` sorts the pairs by
expert and multiplies blocks of tokens of one expert, for prefill; `ragged` uses
`jax.lax.ragged_dot`, for GPUs (on a CPU it is 20-100 times slower). `dense` computes
every expert for every token and is the reference of the tests.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.checks import ConfigError, check_known, check_shape
from moe_edge.model.config import ACTIVATIONS
from moe_edge.model.matvec import to_float32
from moe_edge.model.record import RecordLayout

METHODS = ("pairs", "blocks", "ragged", "dense")
MAX_PAIR_TOKENS = 8  # above this, blocks of tokens beat single tokens


def run_experts(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts_ER: jax.Array,
    layout: RecordLayout,
    *,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    method: str | None = None,
) -> jax.Array:
    """Sums the chosen experts of every token with their weights.

    Args:
      x_TD: float32 (tokens, width).
      ids_TK: int32 (tokens, chosen); E means "no expert" (padding tokens).
      weights_TK: float32 (tokens, chosen).
      experts_ER: records; float32, bfloat16, or uint16 holding bfloat16 bits.
      layout: where the parts stand in a record (static).
      activation: one of `config.ACTIVATIONS` (static).
      swiglu_limit: clip of gate and up, for clamped_swiglu only.
      method: one of METHODS, or None to choose by tokens and backend.
    Returns:
      float32 (tokens, width).
    Raises:
      ConfigError: unknown method or activation, or shapes that do not fit.
    """
    check_known("expert activation", activation, ACTIVATIONS)
    check_shape("x_TD", x_TD, (None, layout.d_model))
    check_shape("ids_TK", ids_TK, (x_TD.shape[0], None))
    check_shape("weights_TK", weights_TK, ids_TK.shape)
    check_shape("experts_ER", experts_ER, (None, layout.size))
    if (activation == "clamped_swiglu") != (swiglu_limit is not None):
        raise ConfigError(
            f"activation {activation!r} got swiglu_limit={swiglu_limit}; the limit "
            "belongs to 'clamped_swiglu', which needs it"
        )
    method = _choose(x_TD.shape[0]) if method is None else method
    check_known("expert method", method, METHODS)
    act = functools.partial(activate, kind=activation, limit=swiglu_limit)
    forms = {"pairs": _pairs, "blocks": _blocks, "ragged": _ragged, "dense": _dense}
    return forms[method](x_TD, ids_TK, weights_TK, experts_ER, layout, act)


def activate(gate: jax.Array, up: jax.Array, *, kind: str, limit=None) -> jax.Array:
    """Combines gate and up `[..., F]`; `kind` is one of `config.ACTIVATIONS`."""
    if kind == "silu":
        return jax.nn.silu(gate) * up
    if kind == "clamped_swiglu":  # gpt-oss
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)
    return jax.nn.gelu(gate, approximate=kind == "gelu_tanh") * up


def _choose(tokens: int) -> str:
    if jax.default_backend() == "gpu":
        return "pairs" if tokens == 1 else "ragged"  # from reading, not measured
    return "pairs" if tokens <= MAX_PAIR_TOKENS else "blocks"


def _block_size(pairs: int, experts: int) -> int:
    """Tokens of a block, from the mean number of tokens of an expert."""
    mean = pairs / experts
    return 16 if mean <= 12 else 32 if mean <= 48 else 64


def _ffn(x_TD, record_R, layout: RecordLayout, act):
    """FFN of one expert on all given tokens; `record_R` as stored."""
    D, F = layout.d_model, layout.expert_dim
    record_R = to_float32(record_R)
    # gate and up are neighbours in the record: one product for both.
    both_GD = record_R[: 2 * F * D].reshape(2 * F, D)
    both_TG = _dot(x_TD, both_GD)
    gate_TF, up_TF = both_TG[:, :F], both_TG[:, F:]
    if layout.has_bias:
        gate_TF = gate_TF + layout.part(record_R, "gate_bias")[None]
        up_TF = up_TF + layout.part(record_R, "up_bias")[None]
    y_TD = _dot(act(gate_TF, up_TF), layout.part(record_R, "down"))
    if layout.has_bias:
        y_TD = y_TD + layout.part(record_R, "down_bias")[None]
    return y_TD


def _dot(x_TI, weight_OI):
    return lax.dot_general(
        x_TI,
        weight_OI,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )


def _record(experts_ER, expert):
    return lax.dynamic_index_in_dim(experts_ER, expert, keepdims=False)


def _pairs(x_TD, ids_TK, weights_TK, experts_ER, layout, act):
    T, K = ids_TK.shape
    E = experts_ER.shape[0]
    rows = []
    for t in range(T):
        y_1D = jnp.zeros((1, layout.d_model), jnp.float32)
        for k in range(K):
            # An id of E is clamped to the last record and its result dropped.
            out_1D = _ffn(
                x_TD[t : t + 1], _record(experts_ER, ids_TK[t, k]), layout, act
            )
            y_1D += jnp.where(ids_TK[t, k] < E, weights_TK[t, k] * out_1D, 0.0)
        rows.append(y_1D)
    return jnp.concatenate(rows)


def _dense(x_TD, ids_TK, weights_TK, experts_ER, layout, act):
    def add(expert, y_TD):
        weight_T = jnp.where(ids_TK == expert, weights_TK, 0.0).sum(axis=1)
        out_TD = _ffn(x_TD, _record(experts_ER, expert), layout, act)
        return y_TD + weight_T[:, None] * out_TD

    return lax.fori_loop(0, experts_ER.shape[0], add, jnp.zeros_like(x_TD))


def _sort_pairs(ids_TK, experts: int):
    """Pairs in order of expert (sentinels last) and the number of each expert."""
    ids_P = ids_TK.reshape(-1)
    order_P = jnp.argsort(ids_P, stable=True)
    counts_E = jnp.bincount(ids_P, length=experts + 1)[:experts]
    return order_P, counts_E.astype(jnp.int32)


def _combine(out_PD, order_P, ids_TK, weights_TK, experts: int):
    """Brings the outputs of sorted pairs back to their tokens and sums over K."""
    T, K = ids_TK.shape
    place_P = jnp.argsort(order_P)
    out_TKD = out_PD[place_P].reshape(T, K, -1)
    keep_TK = ids_TK < experts
    out_TKD = jnp.where(keep_TK[..., None], out_TKD, 0.0)
    weights_TK = jnp.where(keep_TK, weights_TK, 0.0)
    return (out_TKD * weights_TK[..., None]).sum(axis=1)


def _blocks(x_TD, ids_TK, weights_TK, experts_ER, layout, act):
    T, K = ids_TK.shape
    E, D = experts_ER.shape[0], layout.d_model
    size = _block_size(T * K, E)
    order_P, counts_E = _sort_pairs(ids_TK, E)
    # `size` spare rows let the last block read and write past the end.
    x_PD = jnp.pad(x_TD[order_P // K], ((0, size), (0, 0)))
    first_row_E = jnp.cumsum(counts_E) - counts_E
    blocks_E = (counts_E + size - 1) // size
    last_block_E = jnp.cumsum(blocks_E)

    def run_block(block, out_PD):
        expert = jnp.searchsorted(last_block_E, block, side="right").astype(jnp.int32)
        nth = block - (last_block_E[expert] - blocks_E[expert])
        row = first_row_E[expert] + nth * size
        x_BD = lax.dynamic_slice_in_dim(x_PD, row, size)
        out_BD = _ffn(x_BD, _record(experts_ER, expert), layout, act)
        # A short block spills into rows of the next expert, whose block comes later.
        return lax.dynamic_update_slice_in_dim(out_PD, out_BD, row, 0)

    out_PD = lax.fori_loop(0, last_block_E[-1], run_block, jnp.zeros_like(x_PD))
    return _combine(out_PD[: T * K], order_P, ids_TK, weights_TK, E)


def _ragged(x_TD, ids_TK, weights_TK, experts_ER, layout, act):
    K, E, F = ids_TK.shape[1], experts_ER.shape[0], layout.expert_dim
    order_P, counts_E = _sort_pairs(ids_TK, E)
    # Sentinel pairs stand last and go to the last expert; _combine drops them.
    sizes_E = counts_E.at[E - 1].add(order_P.shape[0] - counts_E.sum())
    expert_P = jnp.minimum(ids_TK.reshape(-1)[order_P], E - 1)
    stored_ER = experts_ER
    if stored_ER.dtype == jnp.uint16:
        stored_ER = lax.bitcast_convert_type(stored_ER, jnp.bfloat16)

    def product(x_PI, name):
        weight_EOI = layout.part(stored_ER, name)
        weight_EIO = weight_EOI.swapaxes(1, 2)
        out_PO = lax.ragged_dot(
            x_PI.astype(weight_EIO.dtype),
            weight_EIO,
            sizes_E,
            preferred_element_type=jnp.float32,
        )
        if layout.has_bias:
            bias_EO = layout.part(stored_ER, f"{name}_bias").astype(jnp.float32)
            out_PO = out_PO + bias_EO[expert_P]
        return out_PO

    x_PD = x_TD[order_P // K]
    hidden_PF = act(product(x_PD, "gate"), product(x_PD, "up"))
    return _combine(product(hidden_PF, "down"), order_P, ids_TK, weights_TK, E)
