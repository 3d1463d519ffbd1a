"""The host kernels that can be differentiated: products, experts and attention.

Used where a function is traced within `within`; elsewhere XLA computes gradients.
Sums have a fixed order, so a step gives the same bits on any number of threads.
"""

import contextvars
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.kernels import blocks, native

VECTOR = 16  # floats: rows are whole vectors
_wanted = contextvars.ContextVar("moe_edge_gradients", default=False)


def within(function: Callable) -> Callable:
    """A function whose products have these gradients wherever it is traced."""
    return native.while_wanted(_wanted, function)


def suits(*widths: int, dtype, frozen: bool = False) -> bool:
    """Whether rows of such widths are to be multiplied here; `frozen`: by `experts`."""
    known = (jnp.float32, jnp.bfloat16, jnp.uint16) if frozen else (jnp.float32,)
    return (
        _wanted.get()
        and dtype in known
        and all(width % VECTOR == 0 for width in widths)
        and jax.default_backend() == "cpu"
        and native.is_native()
    )


@jax.custom_vjp
def product(x_TI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """`x @ weight.T`, float32 `[T, O]`; differentiable in both."""
    return blocks.product(x_TI, weight_OI)


def _product(x_TI, weight_OI):
    return product(x_TI, weight_OI), (x_TI, weight_OI)


def _product_back(saved, dy_TO):
    x_TI, weight_OI = saved
    return _back(dy_TO, weight_OI, x_TI, False), _back(dy_TO, x_TI, weight_OI, True)


def _back(dy_TO, other, like, of_rows: bool) -> jax.Array:
    """`dy @ other`, or of the rows `dy.T @ other`; of the shape of `like`."""
    shape = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    call = jax.ffi.ffi_call("moe_edge_product_back", shape)
    return call(dy_TO, other, of_rows=of_rows)


product.defvjp(_product, _product_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def experts(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    records_ER: jax.Array,
    expert_dim: int,
    frozen: bool = False,
) -> jax.Array:
    """The weighted sum of chosen experts with gated SiLU, without biases.

    Args:
      x_TD: float32; D in whole vectors.
      ids_TK: int32; E or more: no expert.
      weights_TK: float32.
      records_ER: float32 records; frozen ones also bfloat16, or uint16 with its bits.
      expert_dim: F, in whole vectors.
      frozen: the records have no gradient.
    Returns:
      float32 `[T, D]`; differentiable in x_TD, weights_TK and, unless they are frozen,
      records_ER.
    """
    return _experts(x_TD, ids_TK, weights_TK, records_ER, expert_dim, frozen)[0]


def _experts(x_TD, ids_TK, weights_TK, records_ER, expert_dim, frozen):
    pairs, (T, D), F = ids_TK.size, x_TD.shape, expert_dim
    shapes = [(T, D), (pairs, F), (pairs, D), (pairs, 2 * F)]
    call = jax.ffi.ffi_call("moe_edge_train", [_floats(*shape) for shape in shapes])
    given = x_TD, ids_TK, weights_TK, records_ER
    y_TD, *kept = call(*given, expert_dim=np.int64(F))
    return y_TD, (*given, *kept)


def _experts_back(expert_dim, frozen, saved, dy_TD):
    x_TD, ids_TK, weights_TK, records_ER, *_ = saved
    pairs, D, F = ids_TK.size, x_TD.shape[1], expert_dim
    room = [(pairs, D), (pairs, 2 * F), (pairs, D)]  # which XLA lends
    of_records = (0, 0) if frozen else records_ER.shape
    shapes = [x_TD.shape, weights_TK.shape, of_records, *room]
    call = jax.ffi.ffi_call(
        "moe_edge_train_back", [_floats(*shape) for shape in shapes]
    )
    dx_TD, dweights_TK, drecords_ER, *_ = call(*saved, dy_TD)
    no_gradient = np.zeros(ids_TK.shape, jax.dtypes.float0)
    return dx_TD, no_gradient, dweights_TK, None if frozen else drecords_ER


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


experts.defvjp(_experts, _experts_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
    q_RSP: jax.Array,
    k_CSP: jax.Array,
    v_CSP: jax.Array,
    window: jax.Array,
    scale: float,
) -> jax.Array:
    """Causal attention of whole sequences: each query over the keys up to its own.

    Args:
      q_RSP: float32; P in whole vectors. Query head r belongs to k_CSP[r // (R / C)].
      k_CSP, v_CSP: float32.
      window: int32 scalar, how many latest positions a query sees.
      scale: of the scores.
    Returns:
      float32 `[R, S, P]`; differentiable in q_RSP, k_CSP and v_CSP.
    """
    return _attend(q_RSP, k_CSP, v_CSP, window, scale)[0]


def _attend(q_RSP, k_CSP, v_CSP, window, scale):
    turned_CPM = _turned(k_CSP)
    weights = _floats(*q_RSP.shape[:2], turned_CPM.shape[2])
    call = jax.ffi.ffi_call("moe_edge_train_attend", [_floats(*q_RSP.shape), weights])
    given = q_RSP, v_CSP, turned_CPM, window.astype(jnp.int32)
    y_RSP, weights_RSM = call(*given, scale=np.float32(scale))
    return y_RSP, (q_RSP, k_CSP, v_CSP, window, weights_RSM)


def _attend_back(scale, saved, dy_RSP):
    q_RSP, k_CSP, v_CSP, window, weights_RSM = saved
    of_keys = _floats(*k_CSP.shape)
    shapes = _floats(*q_RSP.shape), of_keys, of_keys, _floats(*weights_RSM.shape)
    call = jax.ffi.ffi_call("moe_edge_train_attend_back", shapes)
    given = q_RSP, k_CSP, _turned(v_CSP), weights_RSM, dy_RSP
    dq_RSP, dk_CSP, dv_CSP, _ = call(*given, scale=np.float32(scale))
    return dq_RSP, dk_CSP, dv_CSP, np.zeros(window.shape, jax.dtypes.float0)


def _turned(rows_CSP) -> jax.Array:
    """Columns of a sequence, `[C, P, S]` with S in whole vectors."""
    columns_CPS = rows_CSP.transpose(0, 2, 1)
    return jnp.pad(columns_CPS, ((0, 0), (0, 0), (0, -rows_CSP.shape[1] % VECTOR)))


attend.defvjp(_attend, _attend_back)
