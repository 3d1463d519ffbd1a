"""Routed experts on a GPU: all pairs of a layer in two calls of one kernel.

Takes the place of the loops of `experts.run_pairs` and `expert_blocks`, with outputs in
the same places, see `kernels/grouped.py`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.kernels import grouped
from moe_edge.model.record import RecordLayout

FEW_ROWS = 16  # of an expert on average, up to which its weights' bytes take the time


def fill(out_PD, x_TD, ids_TK, records_SR, record_E, experts: int, layout, act):
    """Writes outputs of pairs in order of expert; arguments as of `fill_pairs`."""
    P = ids_TK.size
    few = P <= FEW_ROWS * experts
    tiles = grouped.FEW if few else grouped.MANY
    if record_E is not None:
        record_E = jnp.where(record_E < records_SR.shape[0], record_E, -1)
    place_P = grouped.places(ids_TK.reshape(-1))
    blocks = grouped.plan(ids_TK.reshape(-1), record_E, experts, tiles.rows)
    order_P = _inverse(place_P)
    ids_P = ids_TK.reshape(-1)[order_P]
    if record_E is None:
        record_P = jnp.where(ids_P < experts, ids_P, -1)
    else:
        known_P = jnp.minimum(ids_P, experts - 1)
        record_P = jnp.where(ids_P < experts, record_E[known_P], -1)
    x_PD = x_TD[order_P // ids_TK.shape[1]]
    filled = _ffn(out_PD[:P], x_PD, record_P, records_SR, blocks, tiles, layout, act)
    return lax.dynamic_update_slice_in_dim(out_PD, filled, 0, 0)


def pair_rows(x_TD, slot_TK, records_SR, layout: RecordLayout, act) -> jax.Array:
    """Outputs of pairs, token by token in order of rank, as `experts.pair_rows`.

    Rows of pairs that are left out are arbitrary.
    """
    (T, K), S = slot_TK.shape, records_SR.shape[0]
    slot_P, tiles = slot_TK.reshape(-1), grouped.FEW
    x_PD, D = jnp.repeat(x_TD, K, axis=0), layout.d_model
    if T == 1:  # whose experts are all different: a block each
        rows_P, here_P = jnp.arange(K, dtype=jnp.int32), slot_P < S
        record_P = jnp.where(here_P, slot_P, 0)
        blocks = grouped.Blocks(record_P, rows_P, here_P.astype(jnp.int32))
        return _ffn(D, x_PD, slot_P, records_SR, blocks, tiles, layout, act)
    place_P = grouped.places(slot_P)
    order_P = _inverse(place_P)
    blocks = grouped.plan(slot_P, None, S, tiles.rows)
    record_P = jnp.where(slot_P < S, slot_P, -1)[order_P]
    given = x_PD[order_P], record_P, records_SR, blocks, tiles, layout, act
    return _ffn(D, *given)[place_P]


def add_rows(rows_PD, slot_TK, weights_TK, records: int, start_TD) -> jax.Array:
    """`start_TD` plus the weighted rows of pairs, in order of rank."""
    rows_TKD = rows_PD.reshape(*slot_TK.shape, -1)
    y_TD = start_TD
    for rank in range(slot_TK.shape[1]):
        weighted_TD = weights_TK[:, rank, None] * rows_TKD[:, rank]
        here_T1 = slot_TK[:, rank, None] < records
        y_TD = y_TD + jnp.where(here_T1, weighted_TD, 0.0)
    return y_TD


def _inverse(place_P):
    numbers_P = jnp.arange(place_P.size, dtype=jnp.int32)
    return jnp.zeros_like(numbers_P).at[place_P].set(numbers_P, unique_indices=True)


def _ffn(outputs, x_PD, record_P, records_SR, blocks, tiles, layout, act):
    """FFNs of sorted rows; `outputs` as of `grouped.product`."""
    F, offsets = layout.expert_dim, layout.offsets
    # Gate and up are neighbours in the record.
    given = records_SR, offsets["gate"], blocks, tiles
    both_PG = grouped.product(x_PD, *given, 2 * F)
    if layout.has_bias:
        first, width = offsets["gate_bias"], 2 * F + layout.d_model
        at_P = jnp.maximum(record_P, 0)
        bias_PB = records_SR[at_P, first : first + width].astype(jnp.float32)
        both_PG = both_PG + bias_PB[:, : 2 * F]
    hidden_PF = act(both_PG[:, :F], both_PG[:, F:])
    given = records_SR, offsets["down"], blocks, tiles
    y_PD = grouped.product(hidden_PF, *given, outputs)
    if layout.has_bias:
        here_P1 = ((record_P >= 0) & (record_P < records_SR.shape[0]))[:, None]
        y_PD = jnp.where(here_P1, y_PD + bias_PB[:, 2 * F :], y_PD)
    return y_PD
