"""Choosing the next token of rows whose rules differ: the rules are arrays.

`sampling.sample` compiles a program for every rule; here one program serves every mix,
and a row pays for what it asks only. Limits are found without sorting the vocabulary:
by bisection for the smallest logit that is kept, over the integers that order floats.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_edge.model.sampling import Sampling, likeliest

_BLOCK = 64  # of the vocabulary: sums of blocks, then inside one


class Rules(NamedTuple):
    """How each row draws, and how often it has drawn."""

    temperature_B: jax.Array  # float32, 0 is greedy
    top_k_B: jax.Array  # int32, 0 keeps all
    top_p_B: jax.Array  # float32
    seed_B2: jax.Array  # uint32, high and low word
    step_B: jax.Array  # int32: a row's draw depends on its seed and step alone


def make_rules(rows: Sequence[tuple[Sampling, int]]) -> Rules:
    """NumPy rules of rows, from (sampling, step) of each."""
    rules = [rule for rule, _ in rows]
    words = [divmod(rule.seed % (1 << 64), 1 << 32) for rule in rules]
    return Rules(
        np.array([rule.temperature for rule in rules], np.float32),
        np.array([rule.top_k for rule in rules], np.int32),
        np.array([rule.top_p for rule in rules], np.float32),
        np.array(words, np.uint32).reshape(-1, 2),
        np.array([step for _, step in rows], np.int32),
    )


def allow(logits_BV: jax.Array, bits_BW: jax.Array) -> jax.Array:
    """Logits with those of tokens that must not come next at minus infinity.

    Args:
      bits_BW: uint32, bit i % 32 of word i // 32 is set where token i may come.
    """
    B, V = logits_BV.shape
    bits_BWC = bits_BW[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]
    allowed_BV = (bits_BWC & 1).astype(bool).reshape(B, -1)[:, :V]
    return jnp.where(allowed_BV, logits_BV, -jnp.inf)


def draw_rows(logits_BV: jax.Array, rules: Rules) -> tuple[jax.Array, Rules]:
    """The next token of each row, int32 `[B]`, and the rules of the step after.

    Args:
      logits_BV: float32.
    """

    def add(row, tokens_B):
        logits_V = lax.dynamic_index_in_dim(logits_BV, row, keepdims=False)
        rule = jax.tree.map(lambda array: array[row], rules)
        token = lax.cond(
            rule.temperature_B > 0,
            lambda: _draw(logits_V, rule),
            lambda: likeliest(logits_V),
        )
        return tokens_B.at[row].set(token)

    B = logits_BV.shape[0]
    tokens_B = lax.fori_loop(0, B, add, jnp.zeros(B, jnp.int32))
    return tokens_B, rules._replace(step_B=rules.step_B + 1)


def _draw(logits_V, rule: Rules):
    """One token of a row, by its masses and one uniform number."""
    logits_V = logits_V / rule.temperature_B
    size = -(-logits_V.size // _BLOCK) * _BLOCK
    logits_NC = jnp.pad(
        logits_V, (0, size - logits_V.size), constant_values=-jnp.inf
    ).reshape(-1, _BLOCK)
    mass_NC = jnp.exp(logits_NC - jnp.max(logits_V))
    mass_NC = lax.cond(
        (rule.top_k_B > 0) | (rule.top_p_B < 1),
        lambda: keep_likely(logits_NC, mass_NC, rule.top_k_B, rule.top_p_B),
        lambda: mass_NC,
    )
    key = jax.random.wrap_key_data(rule.seed_B2, impl="threefry2x32")
    share = jax.random.uniform(jax.random.fold_in(key, rule.step_B))
    sums_N = jnp.sum(mass_NC, axis=1)
    block, rest = _find(sums_N, share * jnp.sum(sums_N))
    place, _ = _find(mass_NC[block], rest)
    return (block * _BLOCK + place).astype(jnp.int32)


def _find(mass_N, point):
    """The part of a line in which a point lies, and how far into it.

    Never a part without mass, also where the point is rounded past the end.
    """
    ends_N = jnp.cumsum(mass_N)
    last = mass_N.size - 1 - jnp.argmax(mass_N[::-1] > 0)
    part = jnp.minimum(jnp.sum(ends_N <= point, dtype=jnp.int32), last)
    return part, point - (ends_N[part] - mass_N[part])


def keep_likely(logits_NC, mass_NC, top_k, top_p):
    """Masses with 0 outside the top-k and then the top-p nucleus.

    The same tokens as `sampling.keep_likely` keeps: ties of the last one kept stay.

    Args:
      logits_NC: a row's tempered logits, cut into blocks.
      mass_NC: their exponentials.
      top_k: int32 scalar, 0 keeps all.
      top_p: float32 scalar.
    """
    bits_NC = lax.bitcast_convert_type(logits_NC, jnp.int32)
    # As integers, negative floats stand in the wrong order.
    order_NC = jnp.where(bits_NC < 0, bits_NC ^ np.int32(0x7FFFFFFF), bits_NC)

    def cut(mass_NC, weight_NC, limit):
        low = _lowest_kept(order_NC, weight_NC, limit)
        return jnp.where(order_NC >= low, mass_NC, 0.0)

    mass_NC = lax.cond(
        top_k > 0,
        lambda: cut(mass_NC, jnp.ones_like(mass_NC), top_k.astype(jnp.float32)),
        lambda: mass_NC,
    )
    return lax.cond(
        top_p < 1,
        lambda: cut(mass_NC, mass_NC, top_p * jnp.sum(mass_NC)),
        lambda: mass_NC,
    )


def _lowest_kept(order_NC, weight_NC, limit):
    """The smallest of the numbers above which less than `limit` weighs."""

    def halve(ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        above_C = jnp.sum(jnp.where(order_NC > middle, weight_NC, 0.0), axis=0)
        fits = jnp.sum(above_C) < limit
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    ends = jnp.min(order_NC), jnp.max(order_NC)
    return lax.while_loop(lambda ends: ends[0] < ends[1], halve, ends)[0]


def log_probs(logits_BV: jax.Array, tokens_B: jax.Array, top: int):
    """(of the tokens `[B]`, of the likeliest `[B, top]`, their ids), before any rule.

    Args:
      top: how many of the likeliest (static).
    """
    log_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    own_B = jnp.take_along_axis(log_BV, tokens_B[:, None], axis=-1)[:, 0]
    values_BN, ids_BN = lax.top_k(log_BV, min(top, log_BV.shape[-1]))
    return own_B, values_BN, ids_BN.astype(jnp.int32)
