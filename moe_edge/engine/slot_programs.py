"""The programs of a running batch besides the model's, and its few shapes.

Everything that tells rows apart is data, so a shape is a number of rows, a capacity,
and for prompts the size of a chunk.
"""

import functools

import jax
import numpy as np

from moe_edge.core.checks import CapacityError
from moe_edge.engine.base import Engine
from moe_edge.engine.programs import TopPrograms, count_compiled, jit_step
from moe_edge.engine.session import Session
from moe_edge.engine.sizes import SlotSizes
from moe_edge.engine.slot_rows import MOST_LOGPROBS
from moe_edge.model import kv_cache
from moe_edge.model.config import ModelConfig
from moe_edge.model.row_sampling import draw_rows, greedy_rows, log_probs


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


class SlotShapes(SlotSizes):
    """Sizes of a running batch of one model.

    Args:
      config: the model; sizes: of `SlotSizes`.
    Raises:
      ConfigError: a size that is no positive number; CapacityError: max_context beyond
        the model's.
    """

    def __init__(self, config: ModelConfig, **sizes):
        super().__init__(**sizes)
        if self.max_context > config.max_positions:
            raise CapacityError(
                f"max_context of {self.max_context} tokens exceeds the model's context "
                f"of {config.max_positions}; lower it"
            )
        self.config = config

    def new_session(self, engine: Engine, batch: int, capacity: int) -> Session:
        """A session of one of these capacities."""
        return engine.new_session(batch, min(capacity, engine.config.max_positions))
