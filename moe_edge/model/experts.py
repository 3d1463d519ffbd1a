"""Routed experts: the weighted sum of the chosen experts' FFNs, on flat records.

Forms of one sum, chosen by the number of tokens (`choose_method`, measured): `pairs`
loops over (token, chosen expert), for decoding; `blocks` (`expert_blocks`) sorts the
pairs by expert and multiplies blocks of tokens of one expert, for prefill; `dense`,
every expert for every token, is the tests' reference. On a GPU one kernel takes the
place of both loops (`expert_groups`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.checks import ConfigError, check_known, check_shape
from moe_edge.core.float32 import to_float32
from moe_edge.kernels import eights, native
from moe_edge.model import expert_groups
from moe_edge.model.config_checks import ACTIVATIONS
from moe_edge.model.expert_blocks import (
    ffn,
    load_expert,
    run_blocks,
)
from moe_edge.model.layers import activate
from moe_edge.model.matvec import lane_product, num_lanes
from moe_edge.model.record import RecordLayout

METHODS = ("pairs", "blocks", "dense")


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
      experts_ER: records; float32, bfloat16, uint16 holding bfloat16 bits, or uint8
        of a quantised layout.
      layout: where the parts stand in a record (static).
      activation: one of `config_checks.ACTIVATIONS` (static).
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
    layout.check_dtype(experts_ER.dtype)
    if (activation == "clamped_swiglu") != (swiglu_limit is not None):
        raise ConfigError(
            f"activation {activation!r} got swiglu_limit={swiglu_limit}; the limit "
            "belongs to 'clamped_swiglu', which needs it"
        )
    kind = layout.kind
    method = method or choose_method(x_TD.shape[0], experts_ER.dtype, kind=kind)
    check_known("expert method", method, METHODS)
    act = functools.partial(activate, kind=activation, limit=swiglu_limit)
    forms = {
        "pairs": run_pairs,
        "blocks": run_blocks,
        "dense": _dense,
    }
    return forms[method](x_TD, ids_TK, weights_TK, experts_ER, layout, act)


def choose_method(
    tokens: int, dtype, backend: str | None = None, kind: str | None = None
) -> str:
    """The fastest form for a number of tokens and the records' dtype.

    Args:
      backend: None: JAX's default; an engine's host part names its own.
      kind: of records in blocks, see `RecordLayout`.
    """
    if (backend or jax.default_backend()) == "gpu":
        # Of floats one kernel is behind both (`expert_groups`), which differ in what
        # an offloading engine has to bring before a program runs.
        by_kernel = dtype != jnp.uint8 or eights.takes(kind)
        return "pairs" if tokens <= (16 if by_kernel else 1) else "blocks"
    narrow = dtype in (jnp.uint16, jnp.uint8)
    return "pairs" if tokens <= (16 if narrow else 8) else "blocks"


def _ffn_lanes(x_D, experts_ER, expert, layout: RecordLayout, act):
    """FFN of one expert on one token, at the speed of memory."""
    E, R = experts_ER.shape
    D, F = layout.d_model, layout.expert_dim

    def product(x_I, row, rows):
        # Views of the whole array: a slice of a record would be copied first.
        width = x_I.shape[0]
        table = experts_ER.reshape(E, R // width, width)

        def columns(first, count):
            return lax.dynamic_slice(table, (expert, row, first), (1, rows, count))[0]

        return lane_product(x_I, columns, num_lanes(width))

    both_G = product(x_D, 0, 2 * F)
    gate_F, up_F = both_G[:F], both_G[F:]
    if layout.has_bias:
        biases = to_float32(
            lax.dynamic_slice(
                experts_ER, (expert, layout.offsets["gate_bias"]), (1, 2 * F + D)
            )[0]
        )
        gate_F, up_F = gate_F + biases[:F], up_F + biases[F : 2 * F]
    y_D = product(act(gate_F, up_F), 2 * D, D)
    return y_D + biases[2 * F :] if layout.has_bias else y_D


def _suits_lanes(experts_ER, layout: RecordLayout) -> bool:
    if layout.kind is not None:
        return False  # a column of a row in blocks has no place of its own
    widths = layout.d_model, layout.expert_dim
    fits = all(layout.size % width == 0 and num_lanes(width) for width in widths)
    return fits and jax.default_backend() == "cpu"


def run_pairs(x_TD, ids_TK, weights_TK, experts_ER, layout, act, start_TD=None):
    """The form `pairs`; `start_TD` continues a sum (`expert_waves`)."""
    if native.suits(x_TD.shape[0], experts_ER):
        start_TD = jnp.zeros_like(x_TD) if start_TD is None else start_TD
        pairs = x_TD, ids_TK, weights_TK, experts_ER
        return native.experts(*pairs, layout, act, start_TD)
    if expert_groups.suits(experts_ER, layout):
        start_TD = jnp.zeros_like(x_TD) if start_TD is None else start_TD
        pairs = x_TD, ids_TK, weights_TK, experts_ER
        return expert_groups.run_pairs(*pairs, layout, act, start_TD)
    compute, E = _pair_ffn(experts_ER, layout, act), experts_ER.shape[0]
    return add_pairs(x_TD, ids_TK, weights_TK, E, compute, start_TD)


def _pair_ffn(experts_ER, layout, act):
    """The function (x_D, expert) -> output of an expert on one token."""

    def compute(x_D, expert):
        if _suits_lanes(experts_ER, layout):
            return _ffn_lanes(x_D, experts_ER, expert, layout, act)
        return ffn(x_D[None], load_expert(experts_ER, expert, layout), act)[0]

    return compute


def _or_zeros(compute, x_D, expert, experts: int):
    """`compute(x_D, expert)`; zeros for "no expert" (E and above)."""
    return lax.cond(
        expert < experts, lambda: compute(x_D, expert), lambda: jnp.zeros_like(x_D)
    )


def add_pairs(x_TD, ids_TK, weights_TK, experts: int, compute, start_TD=None):
    """The sum of `compute(x_D, expert)`, pair by pair in their order.

    Of each token only the ranks from its first to its last expert are looked at: rows
    that take fewer experts than others, or none, cost no more than they compute.
    """
    T, K = ids_TK.shape
    ranks_1K, real_TK = jnp.arange(K, dtype=jnp.int32)[None], ids_TK < experts
    first_T = jnp.min(jnp.where(real_TK, ranks_1K, K), axis=1)
    end_T = jnp.max(jnp.where(real_TK, ranks_1K + 1, 0), axis=1)

    def add_token(token, y_TD):
        def add(rank, y_D):
            out_D = _or_zeros(compute, x_TD[token], ids_TK[token, rank], experts)
            return y_D + weights_TK[token, rank] * out_D

        y_D = lax.fori_loop(first_T[token], end_T[token], add, y_TD[token])
        return y_TD.at[token].set(y_D)

    start_TD = jnp.zeros_like(x_TD) if start_TD is None else start_TD
    return lax.fori_loop(0, T, add_token, start_TD)


def pair_rows(x_TD, slot_TK, records_SR, layout, act) -> jax.Array:
    """Outputs of the (token, record) pairs, a row each, with the bits of `run_pairs`.

    Args:
      x_TD: float32 (tokens, width).
      slot_TK: int32, records of each token; S or more leaves the pair out.
      records_SR: expert records.
    Returns:
      float32 (T * K, width), token by token in order of rank; zeros for pairs left out.
    """
    if native.suits(x_TD.shape[0], records_SR):
        none_TK = jnp.zeros(slot_TK.shape, jnp.float32)
        pairs = x_TD, slot_TK, none_TK, records_SR
        return native.experts(*pairs, layout, act, x_TD, rows=True)
    if expert_groups.suits(records_SR, layout):
        rows_PD = expert_groups.pair_rows(x_TD, slot_TK, records_SR, layout, act)
        here_P1 = (slot_TK < records_SR.shape[0]).reshape(-1, 1)
        return jnp.where(here_P1, rows_PD, 0.0)
    compute, K = _pair_ffn(records_SR, layout, act), slot_TK.shape[1]
    slot_P = slot_TK.reshape(-1)

    def write(pair, rows_PD):
        y_D = _or_zeros(compute, x_TD[pair // K], slot_P[pair], len(records_SR))
        return rows_PD.at[pair].set(y_D)

    rows_PD = jnp.zeros((slot_P.size, layout.d_model), jnp.float32)
    return lax.fori_loop(0, slot_P.size, write, rows_PD)


def sum_pair_rows(rows_PD, weights_TK) -> jax.Array:
    """The weighted sum `[T, D]` of what `pair_rows` gives, in `run_pairs`' order."""
    T, K = weights_TK.shape

    def add(pair, y_TD):
        token = pair // K
        return y_TD.at[token].add(weights_TK[token, pair % K] * rows_PD[pair])

    return lax.fori_loop(0, T * K, add, jnp.zeros((T, rows_PD.shape[1]), jnp.float32))


def _dense(x_TD, ids_TK, weights_TK, experts_ER, layout, act):
    def add(expert, y_TD):
        weight_T = jnp.where(ids_TK == expert, weights_TK, 0.0).sum(axis=1)
        out_TD = ffn(x_TD, load_expert(experts_ER, expert, layout), act)
        return y_TD + weight_T[:, None] * out_TD

    return lax.fori_loop(0, experts_ER.shape[0], add, jnp.zeros_like(x_TD))
