"""Generation: prefill, then decode steps until every row has ended.

One loop for every engine mode; an engine offers `new_session`, `prefill`, `decode`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.model.sampling import Sampling, sample

# Called with (row, token id) as soon as a token is known; True ends the row.
TokenCallback = Callable[[int, int], bool | None]


@dataclasses.dataclass(frozen=True)
class Generation:
    """New tokens of each row and what they took.

    Attributes:
      tokens: per row, without the prompt; a stop token ends a row and is kept.
      ttft_s: seconds from the call to the first token.
      decode_s: seconds of all later steps.
      steps: how many later steps there were.
    """

    tokens: list[list[int]]
    ttft_s: float
    decode_s: float
    steps: int


@functools.partial(jax.jit, static_argnames="sampling")
def _next_token(logits_BV, keys_B, step, sampling):
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
    return sample(logits_BV, keys_B, sampling)


def row_keys(seed: int, row_ids: Sequence[int]) -> jax.Array:
    """A random key for each row, from the seed and the row's id alone."""
    ids = jnp.asarray(list(row_ids), jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), ids)


def unseeded(sampling: Sampling) -> Sampling:
    """The rule without its seed, which is no reason to compile again."""
    return dataclasses.replace(sampling, seed=0)


def warm_up(
    engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
) -> float:
    """Compiles all that `generate` runs for these prompts; returns its seconds."""
    started = time.perf_counter()
    longest = max((len(prompt) for prompt in prompts), default=0)
    session = engine.new_session(len(prompts), longest + max_new_tokens)
    logits = engine.prefill(session, prompts)
    step, rule = jax.device_put(np.int32(0)), unseeded(sampling or Sampling())
    tokens_B = _next_token(logits, row_keys(0, range(len(prompts))), step, rule)
    active_B = jax.device_put(np.ones(len(prompts), bool))
    engine.decode(session, tokens_B, active_B).block_until_ready()
    return time.perf_counter() - started


def generate(
    engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    row_ids: Sequence[int] | None = None,
    on_token: TokenCallback | None = None,
    on_routing=None,
) -> Generation:
    """Continues every prompt by up to `max_new_tokens` tokens.

    Args:
      engine: e.g. a `ResidentEngine`.
      prompts: token ids of each row; lengths may differ.
      max_new_tokens: upper bound per row.
      sampling: greedy by default.
      stop_ids: tokens that end a row.
      row_ids: decide, with the seed, what each row draws (default 0, 1, ...); a
        caller that splits its prompts into batches gives each its own.
      on_token: receives every new token, and may end its row by returning True.
      on_routing: receives (layer, Routing) of every step, prefill included.
    Raises:
      RequestError: an empty prompt or a token outside the vocabulary.
      CapacityError: prompt and new tokens exceed the model's context.
    """
    check_count("max_new_tokens", max_new_tokens)
    sampling = sampling or Sampling()
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    keys_B, rule = row_keys(sampling.seed, row_ids), unseeded(sampling)
    started = time.perf_counter()
    longest = max((len(prompt) for prompt in prompts), default=0)
    session = engine.new_session(len(prompts), longest + max_new_tokens)
    logits = engine.prefill(session, prompts, on_routing)
    rows: list[list[int]] = [[] for _ in prompts]
    active = np.ones(len(prompts), bool)
    first = step = 0
    while True:
        tokens_B = _next_token(logits, keys_B, jax.device_put(np.int32(step)), rule)
        for row, token in enumerate(np.asarray(tokens_B).tolist()):
            if active[row]:
                rows[row].append(token)
                active[row] = token not in stop_ids
                if on_token is not None and on_token(row, token):
                    active[row] = False
        if step == 0:
            first = time.perf_counter()
        step += 1
        if step == max_new_tokens or not active.any():
            break
        active_B = jax.device_put(active.copy())  # a put may alias what we change
        logits = engine.decode(session, tokens_B, active_B, on_routing)
    ended = time.perf_counter()
    return Generation(rows, first - started, ended - first, step - 1)
