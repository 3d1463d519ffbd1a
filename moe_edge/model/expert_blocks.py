"""Routed experts for prefill: blocks of tokens that chose the same expert.

Programs of steps on a CPU leave them to C++ (`kernels/blocks.py`): outputs of pairs
stand in the same places. What follows here is XLA's form. On a CPU two things count
besides the products themselves, both measured. A record is copied (and converted)
before it is multiplied, so an expert should get its tokens in as few blocks as
possible. Rows of padding cost as much as tokens, so a block takes the smallest of a
few sizes that holds its tokens: each size is compiled once, whatever the routing.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.float32 import to_float32
from moe_edge.kernels import blocks as native_blocks
from moe_edge.model import expert_groups
from moe_edge.model.matvec import dot, einsum
from moe_edge.model.record import RecordLayout

MAX_SIZES = 6  # of a block; each is a branch to compile
MANY_TOKENS = 64  # of a block that is multiplied as `x @ weight.T`
_apart = lax.optimization_barrier


def load_expert(experts_ER: jax.Array, expert, layout: RecordLayout):
    """float32 gate and up `[2 F, D]`, down `[D, F]`, biases `[2 F + D]` or None."""
    D, F = layout.d_model, layout.expert_dim

    def load(name, shape):
        # Slices of the argument itself: a slice of a slice would be copied twice.
        start = expert, layout.offsets[name]
        part = lax.dynamic_slice(experts_ER, start, (1, layout.count(shape)))[0]
        return lax.optimization_barrier(to_float32(layout.values(part, shape)))

    gate_up_GD = load("gate", (2 * F, D))  # neighbours in the record
    down_DF = load("down", (D, F))
    biases = load("gate_bias", (2 * F + D,)) if layout.has_bias else None
    return gate_up_GD, down_DF, biases


def ffn(x_TD: jax.Array, parts, act) -> jax.Array:
    """FFN of one expert on all given tokens; `parts` from `load_expert`."""
    # Few tokens: weights stand on the left and the tokens' axis is last. XLA:CPU
    # multiplies up to twice as fast this way as by `x @ weight.T`, which is up to
    # a tenth faster for many. Without the barriers XLA turns the products around.
    gate_up_GD, down_DF, biases = parts
    F = down_DF.shape[1]
    if x_TD.shape[0] >= MANY_TOKENS:
        both_TG = dot(_apart(x_TD), gate_up_GD)
        if biases is not None:
            both_TG = both_TG + biases[None, : 2 * F]
        y_TD = dot(_apart(act(both_TG[:, :F], both_TG[:, F:])), down_DF)
        if biases is not None:
            y_TD = y_TD + biases[None, 2 * F :]
        return _apart(y_TD)
    both_GT = einsum("GD,DT->GT", gate_up_GD, _apart(x_TD.T))
    if biases is not None:
        both_GT = both_GT + biases[: 2 * F, None]
    y_DT = einsum("DF,FT->DT", down_DF, act(both_GT[:F], both_GT[F:]))
    if biases is not None:
        y_DT = y_DT + biases[2 * F :, None]
    return _apart(y_DT).T


def sort_pairs(ids_TK: jax.Array, experts: int):
    """Pairs in order of expert (sentinels last) and the number of each expert."""
    ids_P = ids_TK.reshape(-1)
    order_P = jnp.argsort(ids_P, stable=True)
    counts_E = jnp.bincount(ids_P, length=experts + 1)[:experts]
    return order_P, counts_E.astype(jnp.int32)


def combine(out_PD, order_P, ids_TK, weights_TK, experts: int) -> jax.Array:
    """Weighted sum over K of the outputs of sorted pairs, back at their tokens."""
    places_P = jnp.arange(order_P.size, dtype=jnp.int32)
    place_P = jnp.zeros_like(places_P).at[order_P].set(places_P, unique_indices=True)
    y_TD = None
    # Unrolled, so that XLA fuses gathering, masking and summing into one loop.
    for ids_T, place_T, weight_T in zip(
        ids_TK.T, place_P.reshape(ids_TK.shape).T, weights_TK.T, strict=True
    ):
        # A choice, not a zero weight: padding tokens may have overflowed.
        weighted_TD = weight_T[:, None] * out_PD[place_T]
        term_TD = jnp.where((ids_T < experts)[:, None], weighted_TD, 0.0)
        y_TD = term_TD if y_TD is None else y_TD + term_TD
    return y_TD


def block_sizes(pairs: int, experts: int) -> list[int]:
    """Ascending sizes of a block, up to 1.5 times an expert's mean tokens."""
    mean = pairs / experts
    step = 8 if mean <= 32 else 16
    count = min(max(round(1.5 * mean / step), 1), MAX_SIZES)
    return [step * (i + 1) for i in range(count)]


def run_blocks(
    x_TD, ids_TK, weights_TK, experts_ER, layout: RecordLayout, act, load=load_expert
):
    """The form `blocks` of `experts.run_experts`."""
    E = experts_ER.shape[0]
    if _is_native(experts_ER, load):
        choice = x_TD, ids_TK, weights_TK
        return native_blocks.experts(*choice, experts_ER, layout, act)
    out_PD = empty_pairs(ids_TK, layout, E)
    out_PD = fill_pairs(out_PD, x_TD, ids_TK, experts_ER, None, E, layout, act, load)
    return sum_pairs(out_PD, ids_TK, weights_TK, E)


def _is_native(records, load) -> bool:
    return load is load_expert and native_blocks.suits(records)


def empty_pairs(ids_TK, layout: RecordLayout, experts: int) -> jax.Array:
    """Room for the outputs of sorted pairs and for the spill of the last block."""
    largest = block_sizes(ids_TK.size, experts)[-1]
    return jnp.zeros((ids_TK.size + largest, layout.d_model), jnp.float32)


def sum_pairs(out_PD, ids_TK, weights_TK, experts: int) -> jax.Array:
    """The weighted sum of what `fill_pairs` wrote."""
    if native_blocks.suits(out_PD):
        return native_blocks.sum_rows(out_PD, ids_TK, weights_TK, experts)
    order_P, _ = sort_pairs(ids_TK, experts)
    return combine(out_PD, order_P, ids_TK, weights_TK, experts)


def fill_pairs(
    out_PD,
    x_TD,
    ids_TK,
    records_SR,
    slot_E,
    experts: int,
    layout: RecordLayout,
    act,
    load=load_expert,
) -> jax.Array:
    """Writes the outputs of the pairs of some experts, or of all.

    The blocks of an expert, and so its bits, are the same in every call: an engine
    may run a layer in waves of the experts that it holds at a time.

    Args:
      out_PD: outputs so far, in order of expert, see `empty_pairs`.
      x_TD: float32 (tokens, width).
      ids_TK: int32 (tokens, chosen); `experts` means "no expert".
      records_SR: expert records.
      slot_E: int32, the record of each expert; S or more leaves the expert out.
        None: all experts, record e is expert e.
      experts: E.
      layout: where the parts stand in a record.
      act: activation of (gate, up).
      load: reads a record.
    Returns:
      out_PD with these experts' rows.
    """
    if _is_native(records_SR, load):
        if slot_E is None:
            slot_E = jnp.arange(experts, dtype=jnp.int32)
        pairs = x_TD, ids_TK, records_SR, slot_E
        return native_blocks.fill(out_PD, *pairs, layout, act)
    if load is load_expert and expert_groups.suits(records_SR, layout):
        where = x_TD, ids_TK, records_SR, slot_E, experts
        return expert_groups.fill(out_PD, *where, layout, act)
    T, K = ids_TK.shape
    sizes = block_sizes(T * K, experts)
    step, largest = sizes[0], sizes[-1]
    order_P, counts_E = sort_pairs(ids_TK, experts)
    # Spare rows let the last block read and write past the end.
    token_P = jnp.pad(order_P // K, (0, largest))
    first_row_E = jnp.cumsum(counts_E) - counts_E
    blocks_E = (counts_E + largest - 1) // largest
    if slot_E is not None:
        blocks_E = jnp.where(slot_E < records_SR.shape[0], blocks_E, 0)
    last_block_E = jnp.cumsum(blocks_E)

    def branch(size):
        def compute(row, parts):
            token_B = lax.dynamic_slice_in_dim(token_P, row, size)
            y_BD = ffn(x_TD[token_B], parts, act)
            return jnp.pad(y_BD, ((0, largest - size), (0, 0)))

        return compute

    def run_block(block, out_PD):
        expert = jnp.sum(last_block_E <= block, dtype=jnp.int32)
        done = (block - (last_block_E[expert] - blocks_E[expert])) * largest
        row = first_row_E[expert] + done
        record = expert if slot_E is None else slot_E[expert]
        parts = load(records_SR, record, layout)
        # `switch` takes the last branch for all larger rests.
        smallest = (counts_E[expert] - done - 1) // step
        y_BD = lax.switch(smallest, [branch(size) for size in sizes], row, parts)
        if slot_E is not None:
            # Rows of the next expert may be there already: leave them.
            old_BD = lax.dynamic_slice_in_dim(out_PD, row, largest)
            own_B1 = jnp.arange(largest)[:, None] < counts_E[expert] - done
            y_BD = jnp.where(own_B1, y_BD, old_BD)
        # Without waves a short block spills into rows that are written later.
        return lax.dynamic_update_slice_in_dim(out_PD, y_BD, row, 0)

    return lax.fori_loop(0, last_block_E[-1], run_block, out_PD)
