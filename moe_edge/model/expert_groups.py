"""Routed experts on a GPU: all pairs of a layer in two calls of one kernel.

Takes the place of the loops of `experts.run_pairs` and `expert_blocks`, with outputs in
the same places, see `kernels/grouped.py`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.kernels import eights, few, grouped
from moe_edge.model.record import RecordLayout

FEW_ROWS = 16  # of an expert on average, up to which its weights' bytes take the time


def suits(records_SR, layout: RecordLayout) -> bool:
    """Whether pairs are to meet these records by a kernel here."""
    return grouped.suits(records_SR) or eights.suits(records_SR, layout)


def fill(out_PD, x_TD, ids_TK, records_SR, record_E, experts: int, layout, act):
    """Writes outputs of pairs in order of expert; arguments as of `fill_pairs`."""
    ids_P, P = ids_TK.reshape(-1), ids_TK.size
    is_wide = records_SR.dtype == jnp.float32
    tiles = grouped.MANY_WIDE if is_wide else grouped.MANY
    if P <= FEW_ROWS * experts:
        tiles = grouped.FEW
    if record_E is not None:
        record_E = jnp.where(record_E < records_SR.shape[0], record_E, -1)
    order_P = _inverse(grouped.places(ids_P))
    blocks = grouped.plan(ids_P, record_E, experts, tiles.rows)
    source_P, parts = order_P // ids_TK.shape[1], (blocks, tiles, layout, act)
    filled_PD = _ffn(out_PD[:P], x_TD, source_P, records_SR, *parts)
    return lax.dynamic_update_slice_in_dim(out_PD, filled_PD, 0, 0)


def run_pairs(x_TD, slot_TK, weights_TK, records_SR, layout, act, start_TD):
    """`start_TD` plus the weighted outputs of pairs, in order of rank."""
    given = x_TD, slot_TK, records_SR, layout, act
    rows_PD = pair_rows(*given, weights_TK.reshape(-1))
    is_here_TK = (slot_TK >= 0) & (slot_TK < records_SR.shape[0])
    return add_ranks(start_TD, rows_PD, is_here_TK)


def add_ranks(start_TD, rows_PD, is_here_TK) -> jax.Array:
    """`start_TD` plus the rows of pairs that are here, in order of rank."""
    rows_TKD, y_TD = rows_PD.reshape(*is_here_TK.shape, -1), start_TD
    for rank in range(is_here_TK.shape[1]):
        y_TD = y_TD + jnp.where(is_here_TK[:, rank, None], rows_TKD[:, rank], 0.0)
    return y_TD


def pair_rows(
    x_TD, slot_TK, records_SR, layout: RecordLayout, act, scale_P=None
) -> jax.Array:
    """Outputs of pairs, token by token in order of rank, as `experts.pair_rows`.

    Rows of pairs that are left out are arbitrary.

    Args:
      scale_P: float32, a factor of each row; None: 1.
    """
    (T, K), S = slot_TK.shape, records_SR.shape[0]
    tiles, slot_P = grouped.FEW, slot_TK.reshape(-1)
    slot_P = jnp.where(slot_P < 0, S, slot_P)
    shape = T * K, layout.d_model
    if few.is_wanted(act):
        slot_TK = jnp.where(slot_TK < 0, S, slot_TK)
        given = few.plan(slot_TK, S), K, layout, act
        return few.ffn(x_TD, records_SR, *given, scale_P=scale_P)[0]
    if T == 1:  # whose experts are all different: a block each
        rows_P, here_P = jnp.arange(K, dtype=jnp.int32), slot_P < S
        record_P = jnp.where(here_P, slot_P, 0)
        blocks = grouped.Blocks(record_P, rows_P, here_P.astype(jnp.int32))
        parts = blocks, tiles, layout, act
        return _ffn(shape, x_TD, None, records_SR, *parts, scale_P)
    place_P = grouped.places(slot_P)
    order_P = _inverse(place_P)
    blocks = grouped.plan(slot_P, None, S, tiles.rows)
    scale_P = None if scale_P is None else scale_P[order_P]
    parts = blocks, tiles, layout, act
    rows_PD = _ffn(shape, x_TD, order_P // K, records_SR, *parts, scale_P)
    return rows_PD[place_P]


def _inverse(place_P):
    numbers_P = jnp.arange(place_P.size, dtype=jnp.int32)
    return jnp.zeros_like(numbers_P).at[place_P].set(numbers_P, unique_indices=True)


def _ffn(outputs, x_TD, source_P, records_SR, blocks, tiles, layout, act, scale_P=None):
    """FFNs of sorted rows, times `scale_P`; arguments as of `grouped.product`."""
    offsets = layout.offsets
    P = outputs.shape[0] if isinstance(outputs, jax.Array) else outputs[0]
    # Gate and up, and their biases, are neighbours in the record.
    shape = P, 2 * layout.expert_dim
    both_PG = grouped.product(
        *(x_TD, records_SR, offsets["gate"], blocks, tiles, shape),
        kind=layout.kind,
        source_P=source_P,
        bias=offsets.get("gate_bias"),
    )
    combine = act
    # Every tile of outputs combines again: of many rows that takes more than a launch.
    # Triton has no `erf`.
    if tiles.rows > grouped.FEW.rows or act.keywords.get("kind") == "gelu":
        both_PG, combine = act(*jnp.split(both_PG, 2, axis=1)), None
    return grouped.product(
        *(both_PG, records_SR, offsets["down"], blocks, tiles, outputs),
        kind=layout.kind,
        combine=combine,
        bias=offsets.get("down_bias"),
        scale_P=scale_P,
    )
