"""The programs of a running batch besides the model's, and its few shapes.

Everything that tells rows apart is data, so a shape is a number of rows, a capacity,
and for prompts the size of a chunk.
"""

import functools
import math
from collections.abc import Iterable

import jax
import numpy as np

from moe_edge.core.checks import CapacityError
from moe_edge.engine.base import Engine
from moe_edge.engine.programs import TopPrograms, count_compiled, jit_step
from moe_edge.engine.session import Session, cache_bytes
from moe_edge.engine.sizes import SlotSizes, capacity_for, check_context
from moe_edge.engine.slot_rows import MOST_LOGPROBS
from moe_edge.model import kv_cache
from moe_edge.model.config import ModelConfig
from moe_edge.model.row_sampling import allow, draw_rows, log_probs
from moe_edge.model.sampling import likeliest
from moe_edge.model.state_config import ANCHOR


class SlotPrograms:
    """Copies between caches, next tokens by rules of each row, and how likely they are.

    Rows are copied in parts of one size: a part leaves a cache of one shape and enters
    one of another, so there are two programs a shape, not one a pair of shapes.

    Args:
      engine: says what its caches are; engines that share its programs have the same.
    """

    def __init__(self, engine: Engine):
        top: TopPrograms = engine.programs.top
        # Nothing of the engine itself: programs may outlive it and its weights.
        layers = range(engine.config.num_layers)
        self._heads = [engine.cache_heads(layer) for layer in layers]
        self._is_whole = [engine.config.attention_of(i).has_state for i in layers]
        read, write = engine.row_copies()
        read = functools.partial(read)  # counts its own programs
        self.read_row = jax.jit(read, static_argnames=("size", "heads"))
        self.write_row = jax.jit(write, donate_argnums=0)
        self._numbers: dict[int, jax.Array] = {}  # int32 scalars on the device
        self.greedy = jit_step(likeliest)
        self.draw = jit_step(draw_rows)
        self.allow = jit_step(allow)
        self._head = top.head_step
        self.log_probs = jit_step(functools.partial(log_probs, top=MOST_LOGPROBS))
        self.prompt_log_probs = jit_step(self._prompt_log_probs)

    @classmethod
    def of(cls, engine: Engine) -> "SlotPrograms":
        """Those of an engine: whoever runs rows over it shares them."""
        top = engine.programs.top
        if cls not in top.others:
            top.others[cls] = cls(engine)
        return top.others[cls]

    def _prompt_log_probs(self, top, x_BSD, row, next_S):
        """`log_probs` of the tokens that follow those of a chunk's row."""
        x_SD = jax.lax.dynamic_index_in_dim(x_BSD, row, keepdims=False)
        return log_probs(self._head(top, x_SD), next_S, MOST_LOGPROBS)

    def num_compiled(self) -> int:
        """How many have been compiled so far (all shapes)."""
        return count_compiled(self)

    def copy_rows(
        self,
        layer: int,
        cache: kv_cache.Cache,
        other: kv_cache.Cache,
        moves: Iterable[tuple[int, int, int]],
        part: int,
    ) -> kv_cache.Cache:
        """A layer's cache with rows of another one; the first is donated.

        States are copied whole.

        Args:
          moves: (row here, row there, how many of its tokens) of each.
          part: positions that are copied at a time; it divides both capacities.
        """
        heads, whole = self._heads[layer], self._is_whole[layer]
        for to_row, row, tokens in moves:
            for start in (0,) if whole else range(0, tokens, part):
                at, size = self._number(start), None if whole else part
                where = self._number(row), at
                copied = self.read_row(other, *where, size=size, heads=heads)
                cache = self.write_row(cache, self._number(to_row), at, copied)
        return cache

    def copy_out(
        self, engine: Engine, shapes: "SlotShapes", session: Session, row: int, n: int
    ) -> list[kv_cache.Cache]:
        """Caches of one row alone, of its first n tokens: whole chunks."""
        capacity = capacity_for(shapes.kept_capacity(n))
        return [
            self.copy_rows(
                layer,
                engine.new_cache(layer, 1, capacity),
                cache,
                [(0, row, n)],
                shapes.part,
            )
            for layer, cache in enumerate(session.caches)
        ]

    def _number(self, number: int) -> jax.Array:
        if number not in self._numbers:
            self._numbers[number] = jax.device_put(np.int32(number))
        return self._numbers[number]


class SlotShapes(SlotSizes):
    """Sizes of a running batch of one model.

    Args:
      config: the model; sizes: of `SlotSizes`.
    Raises:
      ConfigError: a size that is no positive number; CapacityError: max_context beyond
        the model's.
    """

    def __init__(self, config: ModelConfig, **sizes):
        super().__init__(**sizes, anchor=ANCHOR if config.has_states else 1)
        check_context(self.max_context, config)
        self.config = config
        # Positions that are copied at a time, from cache to cache.
        self.part = math.gcd(self.chunk, *self.capacities, *self.prompt_capacities)

    def new_session(
        self, engine: Engine, batch: int, capacity: int, with_caches: bool = True
    ) -> Session:
        """A session of one of these capacities."""
        capacity = min(capacity, engine.config.max_positions)
        return engine.new_session(batch, capacity, with_caches)

    def row_bytes(self, tokens: int) -> int:
        """Bytes of the cache of a row of so many positions."""
        return cache_bytes(self.config, 1, self.capacity_for(tokens))

    def kept_bytes(self, tokens: int) -> int:
        """Bytes of what the prompt cache keeps of so many tokens, whole chunks."""
        return cache_bytes(self.config, 1, self.kept_capacity(tokens))

    def check_kept(self, budget_bytes: int) -> None:
        """Raises CapacityError for a prompt cache that could never keep a state."""
        least = self.kept_bytes(self.chunk)
        if self.config.has_states and 0 < budget_bytes < least:
            raise CapacityError(
                f"a prompt cache of {budget_bytes} bytes holds no beginning: states "
                f"and the keys and values of a chunk of {self.chunk} tokens take "
                f"{least}; give as much, or 0"
            )

    def check_budget(self, limit_bytes: int | None, kept_bytes: int) -> None:
        """Raises CapacityError where all caches at once would exceed what is left, or
        the prompt cache could never keep a state."""
        self.check_kept(kept_bytes)
        running = self.peak_bytes(self.max_rows * self.row_bytes(self.max_context))
        prompts = self.prompt_bytes()
        if limit_bytes is not None and running + prompts + kept_bytes > limit_bytes:
            raise CapacityError(
                f"caches of {self.max_rows} rows ({running} bytes), of prompts "
                f"on their way ({prompts}) and of the prompt cache ({kept_bytes}) "
                f"exceed the {limit_bytes} bytes that the device budget left for them; "
                "load the engine for more, or ask for fewer rows or tokens"
            )

    def peak_bytes(self, session_bytes: int) -> int:
        """Most bytes of a running batch whose caches take so many, also as it moves.

        It moves into a session of another size layer by layer, so that for a moment
        there are two of one layer, and a part of a row between them.
        """
        longest = self.row_bytes(self.max_context)
        largest, whole = self._largest_share
        return session_bytes + (session_bytes + longest) * largest // whole

    def bytes_within(self, peak_bytes: int) -> int:
        """`peak_bytes` the other way round: the most that a session may take."""
        longest = self.row_bytes(self.max_context)
        largest, whole = self._largest_share
        return ((peak_bytes + 1) * whole - longest * largest - 1) // (whole + largest)

    @functools.cached_property
    def _largest_share(self) -> tuple[int, int]:
        """Bytes of a position in the largest layer's cache, and in all of them.

        With states, which do not grow, of the capacity where that share is largest.
        """
        config = self.config
        layers = [*map(config.attention_of, range(config.num_layers))]
        shares = []
        for capacity in self.capacities if config.has_states else (1,):
            sizes = [kv_cache.cache_bytes(each, 1, capacity) for each in layers]
            shares.append((max(sizes), sum(sizes)))
        return max(shares, key=lambda share: share[0] / share[1])

    def prompt_bytes(self) -> int:
        """Most bytes of the caches of prompts on their way."""
        longest = ((R, self.prompt_tokens(R)) for R in self.prompt_rows)
        sizes = [(R, self.prompt_capacity_for(tokens)) for R, tokens in longest]
        return max(cache_bytes(self.config, *size) for size in sizes)
