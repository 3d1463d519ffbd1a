"""States of gated delta-nets on a GPU: read once and written once, by one launch.

XLA makes several kernels of a step, each of which reads the state again, and several
launches of every sub-chunk of a prompt. Here a program of one Triton kernel (Pallas)
holds some columns of a head's state, which do not depend on its other columns: for a
step, or for all sub-chunks of a prompt one after another.

The bits of a head depend on nothing else that runs. Never timed, so behind an option.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.core.float32 import PRECISION
from moe_edge.kernels import rows, switches

VARIABLE = "MOE_EDGE_DELTA_STATE"
STEP_COLUMNS = 32  # of a state that a program holds: 128 programs of 32 heads
CHUNK_COLUMNS = 32
WARPS = 4
_LEAST = 16  # rows and columns that Triton multiplies


def suits() -> bool:
    """Whether the program that is traced is to take these kernels.

    Raises:
      ConfigError: MOE_EDGE_DELTA_STATE is another value than 0 or 1.
    """
    return switches.chosen(VARIABLE, switches.OFF_ON, "0") == "1" and rows.are_wanted()


def step(q_NK, k_NK, v_NV, g_N, beta_N, state) -> tuple[jax.Array, jax.Array]:
    """A step of N heads: see `native_attention.delta`, also for what it returns."""
    (N, K), V = q_NK.shape, v_NV.shape[1]
    state_NKV = state.reshape(N, K, V)
    columns = min(STEP_COLUMNS, pl.next_power_of_2(V))

    def kernel(q_ref, k_ref, v_ref, g_ref, beta_ref, before_ref, y_ref, state_ref):
        # Through the output alone: XLA copies what two arguments name.
        del before_ref
        head, block = pl.program_id(0), pl.program_id(1)
        at_V = block * columns + jnp.arange(columns, dtype=jnp.int32)
        at_K = jnp.arange(pl.next_power_of_2(K), dtype=jnp.int32)
        q_K, k_K = (_vector(ref, head, at_K, K) for ref in (q_ref, k_ref))
        g, beta = g_ref[head], beta_ref[head]
        place, known_KV = _places(head, at_K, at_V, (K, V))
        state_KV = triton.load(state_ref.at[place], mask=known_KV, other=0.0)
        state_KV = state_KV * jnp.exp(g)
        known_V = jnp.sum(state_KV * k_K[:, None], axis=0)
        change_V = beta * (_vector(v_ref, head, at_V, V) - known_V)
        state_KV = state_KV + k_K[:, None] * change_V[None]
        y_V = jnp.sum(state_KV * q_K[:, None], axis=0)
        moves_KV = known_KV & ((g != 0) | (beta != 0))
        triton.store(state_ref.at[place], state_KV, mask=moves_KV)
        at = jnp.full(at_V.shape, head), at_V
        triton.store(y_ref.at[at], y_V, mask=at_V < V)

    y_NV, after_NKV = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct(v_NV.shape, jnp.float32),
            jax.ShapeDtypeStruct(state_NKV.shape, jnp.float32),
        ],
        grid=(N, pl.cdiv(V, columns)),
        input_output_aliases={5: 1},
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=rows.is_interpreted(),
        name="moe_edge_delta_step",
    )(q_NK, k_NK, v_NV, g_N, beta_N, state_NKV)
    return y_NV, after_NKV.reshape(state.shape)


def advance(
    values, keys, weights, queries, left, forgets, state_NKV
) -> tuple[jax.Array, jax.Array]:
    """All sub-chunks of a prompt, one after another: see `model.delta_net.chunked`.

    Args:
      values: float32 `[M, N, C, V]` of M sub-chunks of C positions and N heads.
      keys, queries, left: `[M, N, C, K]`.
      weights: `[M, N, C, C]`.
      forgets: `[M, N]`, what is left of the state behind a sub-chunk.
    Returns:
      (float32 `[M, N, C, V]`, state).
    """
    (M, N, C, V), K = values.shape, keys.shape[-1]
    columns = max(_LEAST, min(CHUNK_COLUMNS, pl.next_power_of_2(V)))
    wide = max(_LEAST, pl.next_power_of_2(K))

    def kernel(*refs):
        *given, forgets_ref, before_ref, y_ref, state_ref = refs
        head, block = pl.program_id(0), pl.program_id(1)
        at_V = block * columns + jnp.arange(columns, dtype=jnp.int32)
        at_K, at_C = (jnp.arange(each, dtype=jnp.int32) for each in (wide, C))
        # Columns and width of values, keys, weights, queries and what is left.
        kinds = (at_V, V), (at_K, K), (at_C, C), (at_K, K), (at_K, K)
        place, known_KV = _places(head, at_K, at_V, (K, V))
        start_KV = triton.load(before_ref.at[place], mask=known_KV, other=0.0)

        def run(chunk, state_KV):
            values_CV, keys_CK, weights_CC, queries_CK, left_CK = (
                _matrix(ref, (chunk, head), at_C, *kind)
                for ref, kind in zip(given, kinds, strict=True)
            )
            values_CV = values_CV - _product(keys_CK, state_KV)
            y_CV = _product(queries_CK, state_KV) + _product(weights_CC, values_CV)
            at, known_CV = _places((chunk, head), at_C, at_V, (C, V))
            triton.store(y_ref.at[at], y_CV, mask=known_CV)
            added_KV = _product(left_CK, values_CV, over_rows=True)
            return state_KV * forgets_ref[chunk, head] + added_KV

        state_KV = lax.fori_loop(0, M, run, start_KV)
        triton.store(state_ref.at[place], state_KV, mask=known_KV)

    return tuple(
        pl.pallas_call(
            kernel,
            out_shape=[
                jax.ShapeDtypeStruct(values.shape, jnp.float32),
                jax.ShapeDtypeStruct(state_NKV.shape, jnp.float32),
            ],
            grid=(N, pl.cdiv(V, columns)),
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=rows.is_interpreted(),
            name="moe_edge_delta_chunks",
        )(values, keys, weights, queries, left, forgets, state_NKV)
    )


def _product(a, b, over_rows: bool = False) -> jax.Array:
    """`a @ b`, or `a.T @ b`, in float32."""
    contract = ((0 if over_rows else 1,), (0,)), ((), ())
    return lax.dot_general(a, b, contract, precision=PRECISION)


def _vector(ref, head, at_W, width: int) -> jax.Array:
    at = jnp.full(at_W.shape, head), at_W
    return triton.load(ref.at[at], mask=at_W < width, other=0.0)


def _matrix(ref, before, at_R, at_W, width: int) -> jax.Array:
    at, known_RW = _places(before, at_R, at_W, (at_R.size, width))
    return triton.load(ref.at[at], mask=known_RW, other=0.0)


def _places(before, at_R, at_W, sizes: tuple[int, int]):
    """Indices of a matrix behind leading ones, and which of them are inside."""
    shape = at_R.size, at_W.size
    rows_RW = jnp.broadcast_to(at_R[:, None], shape)
    columns_RW = jnp.broadcast_to(at_W[None], shape)
    before = before if isinstance(before, tuple) else (before,)
    known_RW = (rows_RW < sizes[0]) & (columns_RW < sizes[1])
    places = *(jnp.full(shape, each) for each in before), rows_RW, columns_RW
    return places, known_RW
