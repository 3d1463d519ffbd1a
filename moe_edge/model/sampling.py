"""Choosing the next token from logits: greedy, temperature, top-k, top-p."""

import dataclasses
from typing import TYPE_CHECKING

from moe_edge.core.checks import ConfigError

if TYPE_CHECKING:  # the functions import it when they are traced: `Sampling` is light
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: 0 is greedy (the lowest id wins ties).
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose mass reaches p.
      seed: of the random stream; a run repeats exactly with the same seed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature must be 0 (greedy) or positive, got {self.temperature}"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (all) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")


def keep_likely(logits_BV: "jax.Array", top_k: int, top_p: float) -> "jax.Array":
    """Logits with -inf outside the top-k and the top-p nucleus of each row.

    The likeliest token is always kept. Both limits apply to the tempered logits,
    top_k first, as in Hugging Face's logits processors.
    """
    import jax
    import jax.numpy as jnp

    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    if top_k:
        last = min(top_k, logits_BV.shape[-1]) - 1
        logits_BV = jnp.where(
            logits_BV < sorted_BV[:, last : last + 1], -jnp.inf, logits_BV
        )
        rank_V = jnp.arange(logits_BV.shape[-1]).reshape(1, -1)
        sorted_BV = jnp.where(rank_V > last, -jnp.inf, sorted_BV)
    if top_p < 1.0:
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
        inside_BV = jnp.where(before_BV < top_p, sorted_BV, jnp.inf)
        lowest_B1 = jnp.min(inside_BV, axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)
    return logits_BV


def likeliest(logits: "jax.Array") -> "jax.Array":
    """The likeliest token, int32 `[...]` of `[..., V]`; the lowest id wins ties.

    As `jnp.argmax`, of which XLA:CPU makes one slow loop: the best value, then where.
    """
    import jax
    import jax.numpy as jnp

    best = jnp.max(logits, axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_nan = jnp.isnan(logits)  # the likeliest; a GPU's maximum passes over it
    is_best = jnp.where(is_nan.any(axis=-1, keepdims=True), is_nan, logits == best)
    return jnp.min(jnp.where(is_best, ids, logits.shape[-1] - 1), axis=-1)


def sample(
    logits_BV: "jax.Array", keys_B: "jax.Array", sampling: Sampling
) -> "jax.Array":
    """Next token of each row, int32 `[B]`.

    Args:
      logits_BV: float32.
      keys_B: a key a row, consumed (unused if greedy): what a row draws does not
        depend on its neighbours.
      sampling: its `seed` is not used here.
    """
    import jax
    import jax.numpy as jnp

    if sampling.temperature == 0.0:
        return likeliest(logits_BV)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        logits_BV = keep_likely(logits_BV, sampling.top_k, sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
