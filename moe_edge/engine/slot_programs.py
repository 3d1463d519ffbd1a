"""The programs of a running batch besides the model's, and its few shapes.

Everything that tells rows apart is data, so a shape is a number of rows, a capacity,
and for prompts the size of a chunk.
"""

import functools

import jax
import numpy as np

from moe_edge.core.checks import CapacityError, check_count
from moe_edge.engine.base import Engine
from moe_edge.engine.programs import TopPrograms, count_compiled, jit_step
from moe_edge.engine.session import MIN_BUCKET, Session, capacity_for
from moe_edge.engine.slot_rows import MOST_LOGPROBS
from moe_edge.model import kv_cache
from moe_edge.model.config import ModelConfig
from moe_edge.model.row_sampling import draw_rows, greedy_rows, log_probs

_SMALLEST_CAPACITY = 256  # below, a smaller cache saves next to nothing


class SlotPrograms:
    """Copies between caches, next tokens by rules of each row, and how likely they are.

    Args:
      config: the model.
      top: the engine's programs of embedding and head.
    """

    def __init__(self, config: ModelConfig, top: TopPrograms):
        attention = config.attention
        heads = 1 if attention.kind == "mla" else attention.num_kv_heads
        copy = functools.partial(kv_cache.copy_row, heads=heads)
        self.copy_row = jax.jit(copy, donate_argnums=0)
        self.greedy = jit_step(greedy_rows)
        self.draw = jit_step(draw_rows)
        self._head = top.head_step
        self.log_probs = jit_step(functools.partial(log_probs, top=MOST_LOGPROBS))
        self.prompt_log_probs = jit_step(self._prompt_log_probs)

    def _prompt_log_probs(self, top, x_BSD, row, next_S):
        """`log_probs` of the tokens that follow those of a chunk's row."""
        x_SD = jax.lax.dynamic_index_in_dim(x_BSD, row, keepdims=False)
        return log_probs(self._head(top, x_SD), next_S, MOST_LOGPROBS)

    def num_compiled(self) -> int:
        """How many have been compiled so far (all shapes)."""
        return count_compiled(self)

    def copy_caches(self, caches, to_row: int, others, row: int):
        """All layers of `kv_cache.copy_row`; `caches` are donated."""
        rows = np.int32(to_row), np.int32(row)
        rows = jax.device_put(rows)
        return [
            self.copy_row(cache, rows[0], other, rows[1])
            for cache, other in zip(caches, others, strict=True)
        ]


class SlotShapes:
    """Which sizes occur: steps of 4 in capacity, of 2 in rows, of 4 in chunks.

    Args:
      max_rows: rows that run at once.
      max_context: tokens of the longest row, prompt and new.
      prefill_chunk: most tokens of a prompt that run between two steps; the next
        lower power of two is taken.
      prompt_rows: most prompts that are prefilled together.
      deterministic: one shape for all: bits do not depend on company.
    Raises:
      ConfigError: a size that is no positive number; CapacityError: max_context beyond
        the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_rows: int,
        max_context: int,
        prefill_chunk: int,
        prompt_rows: int,
        deterministic: bool,
    ):
        sizes = {
            "max_rows": max_rows,
            "max_context": max_context,
            "prefill_chunk": prefill_chunk,
            "prompt_rows": prompt_rows,
        }
        for name, size in sizes.items():
            check_count(name, size)
        if max_context > config.max_positions:
            raise CapacityError(
                f"max_context of {max_context} tokens exceeds the model's context of "
                f"{config.max_positions}; lower it"
            )
        self.config, self.max_rows, self.max_context = config, max_rows, max_context
        self.deterministic = deterministic
        largest = capacity_for(max_context)
        self.rows = (max_rows,) if deterministic else _powers(max_rows, 1, 2)
        self.prompt_rows = (1,) if deterministic else _powers(prompt_rows, 1, 4)
        self.capacities = (largest,)
        if not deterministic:
            self.capacities = tuple(
                capacity_for(size) for size in _powers(largest, _SMALLEST_CAPACITY, 4)
            )
        # A padded chunk never reaches past the capacity: chunks divide it.
        self.chunk = 1 << min(prefill_chunk, largest).bit_length() - 1
        while any(M > self.chunk and M % self.chunk for M in self.capacities):
            self.chunk //= 2
        self.chunks = _powers(self.chunk, 2 * MIN_BUCKET, 4)

    def new_session(self, engine: Engine, batch: int, capacity: int) -> Session:
        """A session of one of these capacities."""
        return engine.new_session(batch, min(capacity, engine.config.max_positions))

    def rows_for(self, rows: int) -> int:
        return next(size for size in self.rows if size >= rows)

    def prompt_rows_for(self, rows: int) -> int:
        return next(size for size in self.prompt_rows if size >= rows)

    def capacity_for(self, tokens: int) -> int:
        return next(size for size in self.capacities if size >= tokens)

    def padded(self, tokens: int, capacity: int) -> int:
        """Size of a chunk of so many tokens in a session of a capacity."""
        return min(next(size for size in self.chunks if size >= tokens), capacity)

    def kept_capacity(self, tokens: int) -> int:
        """Capacity of a cache that keeps whole chunks: chunk * 1, 2, 4, ..."""
        size = self.chunk
        while size < tokens:
            size *= 2
        return min(size, self.capacities[-1])


def _powers(largest: int, smallest: int, factor: int) -> tuple[int, ...]:
    """largest, largest / factor, ... down to `smallest`, ascending."""
    sizes = [largest]
    while sizes[-1] // factor >= smallest:
        sizes.append(-(-sizes[-1] // factor))
    return tuple(reversed(sizes))
