"""The host kernels of attention and of states: see native.py."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def attend(
    q_BSHP, k, v, start_B, window, scale: float, sinks_H=None, chunked: bool = False
):
    """Causal attention over a cache that holds the tokens' own keys and values.

    A row's bits depend on neither the other rows nor the capacity M.

    Args:
      q_BSHP: float32; query h belongs to head h // (H / G) of the cache.
      k, v: caches `[B * G, M, P]`, or `[M, P]` if that is one row, of one type of
        `model.cache_types`; v may have another width W.
      start_B: int32, position of the first token of each row.
      window: int32 scalar, see `model.kv_cache.visible`; `chunked` too.
      sinks_H: float32 logits that join the denominator, or None.
    Returns:
      float32 `[B, S, H, W]`.
    """
    sinks_H = jnp.zeros(0, jnp.float32) if sinks_H is None else sinks_H
    name = "moe_edge_attend_chunked" if chunked else "moe_edge_attend"
    shape = *q_BSHP.shape[:-1], _cached_width(v)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, jnp.float32))
    scale = np.float32(scale)
    return call(q_BSHP, k, v, start_B, window, sinks_H, scale=scale)


def _cached_width(cache: jax.Array) -> int:
    """Values in a row of a cache; those of bytes are blocks of q8_0."""
    width = cache.shape[-1]
    return width if cache.dtype != jnp.uint8 else width // 34 * 32


def delta(q_NK, k_NK, v_NV, g_N, beta_N, state) -> tuple[jax.Array, jax.Array]:
    """A step of N heads of delta-nets: see `model.delta_net.step`.

    The state is written in place if nobody else needs it; a head whose g and beta are 0
    keeps its bits. A head's bits do not depend on the others.

    Args:
      state: `[..., V]`, N x K x V in the shape that its cache has: a reshape before a
        call in place is a copy to XLA, and one behind it another.
    Returns:
      (float32 `[N, V]`, state).
    """
    like = jax.ShapeDtypeStruct(v_NV.shape, jnp.float32)
    after = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    aliases = {5: 1}
    call = jax.ffi.ffi_call(
        "moe_edge_delta", (like, after), input_output_aliases=aliases
    )
    return tuple(call(q_NK, k_NK, v_NV, g_N, beta_N, state))


def step(
    products: Sequence[jax.Array],
    caches: Sequence[jax.Array],
    norms: Sequence[jax.Array],
    tables: Sequence[jax.Array] | None,
    start_B,
    window,
    scale: float,
    *,
    eps: float,
    interleaved: bool,
    sinks_H=None,
    chunked: bool = False,
) -> list[jax.Array]:
    """Attention of one token in each row, from its products on, in one call.

    Its bits are those of norms, `model.rope.rotate`, `kv_cache.write` and `attend`.

    Args:
      products: float32 q `[B, H, P]`, k `[B, G, P]`, v `[B, G, W]`.
      caches: of k and v, as of `attend`; written in place where they are donated.
      norms: float32 weights `[P]` of heads of q and k; or neither.
      tables: cosines and sines `[B, 1, half]` of the positions, None: no rotation.
      start_B: int32, position of each token.
      window, scale, sinks_H, chunked: as of `attend`.
      eps: of the norms; interleaved: see `rotate`.
    Returns:
      float32 `[B, H, W]`, and the caches.
    """
    none = jnp.zeros(0, jnp.float32)
    norms, tables = norms or (none, none), tables or (none, none)
    sinks_H = none if sinks_H is None else sinks_H
    q, _, v = products
    y = jax.ShapeDtypeStruct((*q.shape[:2], v.shape[-1]), jnp.float32)
    results = [y, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in caches)]
    name = "moe_edge_step_chunked" if chunked else "moe_edge_step"
    call = jax.ffi.ffi_call(name, results, input_output_aliases={3: 1, 4: 2})
    given = *products, *caches, *norms, *tables, start_B, window, sinks_H
    options = {"scale": np.float32(scale), "eps": np.float32(eps)}
    return call(*given, **options, interleaved=interleaved)


def step_latent(
    q_BHP,
    low_BL,
    cache,
    norm_R,
    up_OR,
    tables,
    start_B,
    window,
    scale: float,
    *,
    eps: float,
    interleaved: bool,
    value: int,
) -> list[jax.Array]:
    """Latent attention of one token in each row, from its products on, in one call.

    A row's bits depend on neither the other rows nor the capacity M.

    Args:
      q_BHP: float32 queries, of each head the N values without rotation first.
      low_BL: float32, latent and shared key `[B, R + O]`, neither normed nor rotated.
      cache: `[B, M, R + O]`, or `[M, R + O]` if that is one row, of a type of
        `model.cache_types`; written in place where it is donated.
      norm_R: float32 weights of the latent's norm.
      up_OR: stored up-projections `[H * (N + value), R]`: each head's of keys, then
        that of values.
      tables: cosines and sines `[B, 1, O / 2]` of the positions.
      start_B: int32, position of each token.
      window, scale: as of `attend`; eps: of the norm; interleaved: see `rotate`.
      value: width of a head's values.
    Returns:
      float32 `[B, H, value]`, and the cache.
    """
    y = jax.ShapeDtypeStruct((*q_BHP.shape[:2], value), jnp.float32)
    results = [y, jax.ShapeDtypeStruct(cache.shape, cache.dtype)]
    call = jax.ffi.ffi_call("moe_edge_latent", results, input_output_aliases={2: 1})
    given = q_BHP, low_BL, cache, norm_R, up_OR, *tables, start_B, window
    options = {"scale": np.float32(scale), "eps": np.float32(eps)}
    return call(*given, **options, interleaved=interleaved)
