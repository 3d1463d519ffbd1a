"""Attention over a cache as far as it is filled: XLA's form for long capacities.

One product over the whole cache costs what its capacity does. Here a loop takes blocks
of positions, from the first that any row of the call sees to the last, and joins them
by a running softmax. Blocks stand at fixed positions, and one that hides from a row
changes nothing of it: a row's sums depend on neither the capacity nor how far others
are. How many blocks there are is data, so a growing sequence compiles nothing.

Caches of up to `SHORT` positions are read whole. On a GPU the loop stands behind
MOE_EDGE_FILLED_ATTENTION=1, until it was timed there.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.kernels import switches
from moe_edge.model import cache_types, kv_cache
from moe_edge.model.matvec import einsum

VARIABLE = "MOE_EDGE_FILLED_ATTENTION"
BLOCK = 512  # positions at once; divides every longer capacity of `engine/sizes.py`
SHORT = 1024
HIDDEN = -1e30  # a finite minus infinity


def is_asked() -> bool:
    """Whether long caches are read in blocks.

    Raises:
      ConfigError: MOE_EDGE_FILLED_ATTENTION is neither 0 nor 1.
    """
    default = "0" if jax.default_backend() == "gpu" else "1"
    return switches.chosen(VARIABLE, switches.OFF_ON, default) == "1"


def describe() -> str:
    """How XLA attends over a long cache, for people."""
    return f"long caches {'as far as filled' if is_asked() else 'whole'}"


def suits(capacity: int) -> bool:
    """Whether a cache of so many positions is to be read in blocks; see `is_asked`."""
    return is_asked() and capacity > SHORT and capacity % BLOCK == 0


def attend(
    q_RQP, k, v, start_B, window, tokens: int, chunked: bool = False, sinks_RQ1=None
) -> jax.Array:
    """Causal attention over a cache that holds the tokens' own keys and values.

    Args:
      q_RQP: float32, scaled; R: rows of the batch * heads of the cache; Q: queries of
        such a head * S tokens, the tokens of a query side by side.
      k, v: caches as they are stored (`kv_cache.cache_arrays`): XLA would copy what is
        reshaped. One array where values are the keys.
      start_B: int32, position of the first token of each row.
      window, chunked: see `kv_cache.visible`.
      tokens: S.
      sinks_RQ1: float32 logits that join the denominator, or None.
    Returns:
      float32 `[R, Q, W]`, W the width of v.
    """
    (R, Q, _), B = q_RQP.shape, start_B.shape[0]
    M, W, S = k.shape[-2], cache_types.width_of(v), tokens
    # A row that rests may stand beyond the cache.
    last_B = jnp.minimum(start_B + S, M) - 1
    oldest_B = start_B // window * window if chunked else start_B - window + 1
    oldest_B = jnp.clip(oldest_B, 0, last_B)
    blocks = jnp.min(oldest_B) // BLOCK, jnp.max(last_B) // BLOCK + 1

    def block(array, at):
        taken = lax.dynamic_slice_in_dim(array, at, BLOCK, -2)
        return cache_types.decode(taken).reshape(R, BLOCK, -1)

    def add(number, state):
        top_RQ1, total_RQ1, sum_RQW = state
        at = number * BLOCK
        k_RNP = block(k, at)
        v_RNW = k_RNP if v is k else block(v, at)
        seen = kv_cache.visible(start_B, S, BLOCK, window, chunked, at)[:, None]
        scores = einsum("RQP,RNP->RQN", q_RQP, k_RNP).reshape(B, -1, S, BLOCK)
        scores = jnp.where(seen, scores, HIDDEN).reshape(R, Q, BLOCK)
        higher_RQ1 = jnp.maximum(top_RQ1, jnp.max(scores, axis=-1, keepdims=True))
        # Of a row that sees nothing yet, hidden ones have the highest score.
        weights = jnp.exp(scores - higher_RQ1).reshape(B, -1, S, BLOCK)
        weights = jnp.where(seen, weights, 0.0).reshape(R, Q, BLOCK)
        old_RQ1 = jnp.exp(top_RQ1 - higher_RQ1)
        total_RQ1 = total_RQ1 * old_RQ1 + jnp.sum(weights, axis=-1, keepdims=True)
        sum_RQW = sum_RQW * old_RQ1 + einsum("RQN,RNW->RQW", weights, v_RNW)
        return higher_RQ1, total_RQ1, sum_RQW

    top_RQ1 = jnp.full((R, Q, 1), HIDDEN) if sinks_RQ1 is None else sinks_RQ1
    total_RQ1 = jnp.full((R, Q, 1), 0.0 if sinks_RQ1 is None else 1.0)
    state = top_RQ1, total_RQ1, jnp.zeros((R, Q, W))
    _, total_RQ1, sum_RQW = lax.fori_loop(*blocks, add, state)
    return sum_RQW / total_RQ1
