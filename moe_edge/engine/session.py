"""Sequences in progress, and how prompts are cut into chunks of few shapes."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.engine.sizes import bucket, capacity_for
from moe_edge.model import kv_cache
from moe_edge.model.config import ModelConfig
from moe_edge.model.kv_cache import Cache

PREFILL_CHUNK = 512


@dataclasses.dataclass(eq=False)
class Session:
    """Sequences in progress, a row each."""

    caches: list[Cache]  # of every layer
    positions_B: jax.Array  # int32, on the device: of each row's next token
    capacity: int  # tokens that a row's cache holds
    # Tokens that each row has written: the host's own count, so that nothing waits for
    # the device to check it.
    lengths: list[int]
    # The number of each row's sequence, for predictors and policies that keep a record
    # of every one; no two sequences have the same.
    sequences: list[int]
    # int32, on the device: experts (or sub-experts) of each row's tokens, from 1 to the
    # model's own k. Data: rows of any K are one program. None: all take the model's.
    k_B: jax.Array | None = None
    growth: list[int] = dataclasses.field(default_factory=list)  # of a step, each row

    def __post_init__(self):
        self.growth = self.growth or [1] * len(self.lengths)

    def grow(self, tokens: Sequence[int]) -> None:
        """Counts tokens that are about to be written, of each row.

        Raises:
          CapacityError: more than fit. XLA would shift the write onto older keys.
        """
        lengths = [old + new for old, new in zip(self.lengths, tokens, strict=True)]
        if max(lengths) > self.capacity:
            row = lengths.index(max(lengths))
            raise CapacityError(
                f"{self.lengths[row]} tokens and {tokens[row]} more exceed the "
                f"session's capacity of {self.capacity}; open one with more"
            )
        self.lengths = lengths


def cache_bytes(config: ModelConfig, batch: int, tokens: int) -> int:
    """Bytes of the caches of a session for `batch` rows of up to `tokens`."""
    capacity = capacity_for(tokens)
    layers = map(config.attention_of, range(config.num_layers))
    return sum(kv_cache.cache_bytes(each, batch, capacity) for each in layers)


def check_room(
    config: ModelConfig, batch: int, capacity: int, limit_bytes: int | None
) -> None:
    """Refuses a session beyond the model's context, or whose caches are too large.

    Args:
      limit_bytes: that caches may take; None: any.
    """
    if capacity > config.max_positions:
        raise CapacityError(
            f"{capacity} tokens (prompt and new) exceed the model's context of "
            f"{config.context_words}; shorten the prompt or ask for fewer"
        )
    needed_bytes = cache_bytes(config, batch, capacity)
    if limit_bytes is not None and needed_bytes > limit_bytes:
        raise CapacityError(
            f"the KV cache of {batch} rows of {capacity} tokens takes {needed_bytes} "
            f"bytes, the device budget left {limit_bytes}; load the engine for more "
            "(max_batch, max_context), ask for fewer rows or tokens, or give "
            "device_memory in per cent, which counts experts only"
        )


def padded(
    prompts: Sequence[Sequence[int]], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows, int32 `[B, width]`, and bool: which are tokens of theirs."""
    tokens_BP = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BP[row, : len(prompt)] = prompt
    lengths_B1 = np.asarray([[len(prompt)] for prompt in prompts])
    return tokens_BP, np.arange(width)[None] < lengths_B1


def plan_chunks(longest: int, capacity: int) -> list[tuple[int, int]]:
    """(start, padded size) of every chunk of prompts of up to `longest` tokens.

    A padded chunk never reaches past the capacity: see `Session.grow`.
    """
    return [
        (start, min(bucket(min(PREFILL_CHUNK, longest - start)), capacity - start))
        for start in range(0, longest, PREFILL_CHUNK)
    ]


def _is_whole(item) -> bool:
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)


def _whole_numbers(row: int, prompt) -> np.ndarray:
    """The ids of a prompt as an array of whole numbers `[T]`, else RequestError."""
    try:
        ids = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):  # of unequal lengths, for example
        ids = np.asarray(None)
    wrong = []
    if isinstance(prompt, (list, tuple, np.ndarray)) and ids.ndim == 1:
        # One by one: NumPy takes True among numbers for 1.
        wrong = [x for x in prompt if not _is_whole(x)]
    if ids.ndim == 1 and (ids.size == 0 or ids.dtype.kind in "iu" and not wrong):
        return ids
    shown = wrong[0] if wrong else prompt
    raise RequestError(
        f"prompt {row} holds {shown!r:.40}, expected token ids: a list of whole numbers"
    )


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[int]:
    """Lengths of the prompts.

    Raises:
      RequestError: none, an empty one, or what is no token id of the vocabulary.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise RequestError(
            f"prompts are {prompts!r:.40}, expected a list of lists of token ids"
        )
    if len(prompts) == 0:
        raise RequestError("no prompts given; expected at least one")
    for row, prompt in enumerate(prompts):
        ids = _whole_numbers(row, prompt)
        if len(ids) == 0:
            raise RequestError(f"prompt {row} is empty; expected at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise RequestError(
                f"prompt {row} holds token id {low if low < 0 else high}, expected "
                f"0..{vocab_size - 1}: is it this model's tokenizer?"
            )
    return [len(prompt) for prompt in prompts]
