"""The host kernels for many tokens as JAX functions, see native/blocks.inc.

A row's bits depend on neither the other tokens nor the number of threads. Those of a
dense product are others than `native.linear`'s, which few rows take.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import check_shape
from moe_edge.kernels import native

# Vectors up to which `native.linear` is faster on dense weights; on interleaved ones,
# which it decodes without moving lanes, while `product` widens them first.
MAX_LINEAR_ROWS, MAX_ROWS_ON_EIGHTS = 2, 8
LANES = 16  # floats in a vector: hidden rows are padded to whole ones


def suits(records: jax.Array) -> bool:
    """Whether tokens are to meet these records, or rows of pairs be summed, here."""
    return native.suits(0, records)


def suits_product(rows: int, weights: jax.Array, width: int) -> bool:
    """Whether so many vectors of a width are to meet dense weights by `product`."""
    if rows <= MAX_LINEAR_ROWS or not native.suits(0, weights):
        return False
    return rows > MAX_ROWS_ON_EIGHTS or not native.in_eights(weights, width)


def product(x_TI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """`x @ weight.T`, float32 `[T, O]`."""
    outputs = native.num_outputs(weight_OI, x_TI.shape[1])
    shape = jax.ShapeDtypeStruct((x_TI.shape[0], outputs), jnp.float32)
    return jax.ffi.ffi_call("moe_edge_product", shape)(x_TI, weight_OI)


def experts(x_TD, ids_TK, weights_TK, records_ER, layout, act) -> jax.Array:
    """The weighted sum `[T, D]` of chosen experts; arguments as of `run_blocks`."""
    hidden, options = _hidden(x_TD, ids_TK, layout, act)
    outputs = jax.ShapeDtypeStruct((ids_TK.size, layout.d_model), jnp.float32)
    shapes = (jax.ShapeDtypeStruct(x_TD.shape, jnp.float32), hidden, outputs)
    call = jax.ffi.ffi_call("moe_edge_blocks", shapes)
    return call(x_TD, ids_TK, weights_TK, records_ER, **options)[0]


def fill(out_PD, x_TD, ids_TK, records_SR, slot_E, layout, act) -> jax.Array:
    """Writes outputs of pairs in order of expert; arguments as of `fill_pairs`."""
    hidden, options = _hidden(x_TD, ids_TK, layout, act)
    shapes = (jax.ShapeDtypeStruct(out_PD.shape, jnp.float32), hidden)
    call = jax.ffi.ffi_call("moe_edge_fill", shapes, input_output_aliases={0: 0})
    return call(out_PD, x_TD, ids_TK, records_SR, slot_E, **options)[0]


def sum_rows(out_PD, ids_TK, weights_TK, experts: int) -> jax.Array:
    """The weighted sum `[T, D]` of what `fill` wrote, with the bits of `experts`."""
    shape = jax.ShapeDtypeStruct((ids_TK.shape[0], out_PD.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call("moe_edge_sum", shape)
    return call(out_PD, ids_TK, weights_TK, experts=np.int64(experts))


def _hidden(x_TD, ids_TK, layout, act):
    """Room for the hidden values of all pairs, which XLA lends; a call's options."""
    check_shape("x_TD", x_TD, (ids_TK.shape[0], layout.d_model))
    width = -(-layout.expert_dim // LANES) * LANES
    options = {
        "expert_dim": np.int64(layout.expert_dim),
        "has_bias": layout.has_bias,
        "activation": np.int64(native.ACTIVATIONS.index(act.keywords["kind"])),
        "limit": np.float32(act.keywords["limit"] or 0.0),
        "kind": np.int64(native.BLOCK_KINDS[layout.kind]),
    }
    return jax.ShapeDtypeStruct((ids_TK.size, width), jnp.float32), options
