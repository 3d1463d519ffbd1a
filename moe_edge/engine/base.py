"""What every engine shares: sessions, embedding, prefill in chunks, decoding, head.

An engine differs in how it runs the layers of a step (`_run_layers`): all experts on
the device (`resident`), planned layer by layer by the host (`layered`), or in one
program that fetches what it misses (`fused`). Shapes depend on batch, chunk and cache
capacity only, so nothing is compiled while a sequence grows.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.core.interrupts import check_interrupt
from moe_edge.engine.expert_state import Watched
from moe_edge.engine.programs import Programs
from moe_edge.engine.session import (
    Session,
    check_prompts,
    check_room,
    padded,
    plan_chunks,
)
from moe_edge.engine.sizes import capacity_for
from moe_edge.engine.weights import Weights
from moe_edge.model import kv_cache
from moe_edge.model.sub_experts import at_k
from moe_edge.model.transformer import layer_window

_sequence_numbers = itertools.count()  # of all engines: points of one share sessions


class Engine(Watched):
    """Steps of a model; a subclass runs the layers.

    Args:
      weights: the model; `weights.experts` may be None where a subclass keeps them.
      programs: of the same model; engines may share them.
    Raises:
      ConfigError: programs of another model.
    """

    kv_limit_bytes: int | None = None  # of a session, where a budget says so
    lossless: bool = True  # whether tokens are those of the resident engine
    # Whether a step may begin before it is known to be wanted: nothing but the
    # session's caches knows of it.
    may_run_ahead: bool = False

    def __init__(self, weights: Weights, programs: Programs):
        programs.check(weights.config)
        self.config, self.weights, self.programs = weights.config, weights, programs
        self._windows = [
            jnp.int32(layer_window(self.config, layer))
            for layer in range(self.config.num_layers)
        ]
        self._points: dict[int, Engine] = {self.config.moe.top_k: self}

    @property
    def may_discard(self) -> bool:
        """Whether a step that ran ahead may be thrown away and be run again.

        Keys and values are then written twice; a state would advance twice.
        """
        return self.may_run_ahead and not self.config.has_states

    def begin_prompts(self, session: Session, prompts) -> None:
        """Prompts are about to run: one step, however many chunks."""

    def check_rows(self, deterministic: bool = False) -> None:
        """Raises ConfigError where rows of a session may not join and leave.

        That is where something keeps a record of one sequence for all rows; with
        `deterministic` also where what a row gets depends on its company.
        """

    def crowded(self):
        """Inside this context a layer runs in chunks whenever its experts might exceed
        the slots.

        For a warm-up: which programs are compiled then does not depend on the routing.
        """
        return contextlib.nullcontext()

    def put(self, tree):
        """Arrays of the host on the device, as the engine's programs expect them."""
        return jax.device_put(tree)

    def _begin_tokens(self, session: Session, tokens_B, active_B) -> None:
        """A token of each row is about to run."""

    def _run_layers(self, session: Session, x_BSD, chunk, on_routing):
        """Runs all layers, writes the session's caches, returns x_BSD."""
        raise NotImplementedError

    def _sibling(self, weights: Weights) -> "Engine":
        """An engine that shares all but the programs of its layers; see `at_k`."""
        raise ConfigError(
            f"{type(self).__name__} computes {self.config.moe.top_k} experts a token "
            "as long as it lives; load the model with the k that you want (--k), "
            "or use mode layered"
        )

    def at_k(self, k: int | None) -> "Engine":
        """This model at another operating point: K experts (or sub-experts) a token.

        Weights, slots and what they hold are shared, sessions fit every point, and
        a point keeps its programs: switching between points used before compiles
        nothing (MoE-Prism, section 5). Policies that look at the model's k (HybriMoE,
        AdapMoE's plan) keep that of the engine that was loaded.

        Raises:
          ConfigError: k out of range, or an engine that has one point only.
        """
        config = at_k(self.config, k)
        if config.moe.top_k not in self._points:
            point = self._sibling(dataclasses.replace(self.weights, config=config))
            point.kv_limit_bytes, point._points = self.kv_limit_bytes, self._points
            self._points[config.moe.top_k] = point
        return self._points[config.moe.top_k]

    def num_compiled(self) -> int:
        """How many programs have been compiled so far (all shapes)."""
        return self.programs.num_compiled()

    def close(self) -> None:
        """Ends what runs in the background; the engine is then no longer usable."""

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # Steps.

    def new_cache(self, layer: int, batch: int, capacity: int) -> kv_cache.Cache:
        """An empty cache of a layer, of a session's capacity."""
        attention = self.config.attention_of(layer)
        return self.put(kv_cache.empty_cache(attention, batch, capacity))

    def put_cache(self, cache: kv_cache.Cache) -> kv_cache.Cache:
        """A layer's cache of the host on the device, as `new_cache` would make it."""
        return self.put(cache)

    def cache_arrays(
        self, layer: int, batch: int, capacity: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of `new_cache`."""
        attention = self.config.attention_of(layer)
        return kv_cache.cache_arrays(attention, batch, capacity)

    def cache_heads(self, layer: int) -> int:
        """Rows of a layer's cache, on each device, of one row of the batch."""
        return self.config.attention_of(layer).cache_heads

    def row_copies(self) -> tuple[Callable, Callable]:
        """`kv_cache.read_row` and `write_row` as its caches need them, to be traced."""
        return kv_cache.read_row, kv_cache.write_row

    def new_caches(self, batch: int, capacity: int) -> list[kv_cache.Cache]:
        """Those of all layers."""
        return self.put(kv_cache.empty_caches(self.config, batch, capacity))

    def new_session(
        self, batch: int, capacity: int, with_caches: bool = True
    ) -> Session:
        """Empty caches for `batch` sequences of up to `capacity` tokens.

        Args:
          with_caches: False leaves them to the caller, layer by layer (`new_cache`).
        Raises:
          CapacityError: more than the model's context.
        """
        check_room(self.config, batch, capacity, self.kv_limit_bytes)
        capacity = capacity_for(capacity)
        caches = self.new_caches(batch, capacity) if with_caches else []
        numbers = [next(_sequence_numbers) for _ in range(batch)]
        positions_B = jnp.zeros(batch, jnp.int32)
        return Session(caches, positions_B, capacity, [0] * batch, numbers)

    def chunks(self, session: Session, prompts, on_routing=None):
        """Runs prompts chunk by chunk from the start of an empty session.

        Args:
          session: fresh, of as many rows as prompts.
          prompts: token ids of each row, of unequal lengths.
          on_routing: called with (layer, Routing) of every MoE layer; arrays are
            still on the device.
        Yields:
          (start, x_BCD): position of the chunk and its last hidden states; rows
          are right-padded.
        Raises:
          RequestError: an empty prompt, or a token outside the vocabulary.
          CapacityError: a prompt longer than the session, or one already used.
        """
        lengths = check_prompts(prompts, self.config.vocab_size)
        if any(session.lengths):
            raise CapacityError("prefill needs a fresh session; open a new one")
        session.grow(lengths)
        self.begin_prompts(session, prompts)
        chunks = plan_chunks(max(lengths), session.capacity)
        tokens_BP, valid_BP = padded(prompts, sum(chunks[-1]))
        for start, size in chunks:
            check_interrupt()
            start_B = np.full(len(prompts), start, np.int32)
            here = slice(start, start + size)
            chunk = tokens_BP[:, here], valid_BP[:, here], start_B
            yield start, self.run_chunk(session, *chunk, on_routing)
        session.positions_B = self.put(np.asarray(lengths, np.int32))

    def run_chunk(
        self, session: Session, tokens_BS, valid_BS, start_B, on_routing=None
    ):
        """A chunk of every row's prompt, right-padded; returns x_BSD.

        The caller counts what the rows hold (`Session.grow`, `positions_B`).

        Args:
          tokens_BS: int32 array of the host.
          valid_BS: bool array of the host, False for padding.
          start_B: int32 array of the host, position of each row's first token.
          on_routing: as in `chunks`.
        """
        x, chunk = self.programs.top.embed(
            self.weights.top["embed"],
            *self.put((tokens_BS, start_B, valid_BS)),
            session.k_B,
        )
        return self._run_layers(session, x, chunk, on_routing)

    def prefill(self, session: Session, prompts, on_routing=None) -> jax.Array:
        """Logits after the last token of each prompt, float32 `[B, V]`."""
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        last = self.put(np.zeros((len(prompts), self.config.d_model), np.float32))
        for start, x in self.chunks(session, prompts, on_routing):
            last = self.programs.top.last(x, last, self.put(lengths - 1 - start))
        return self.programs.top.head(self.weights.top, last)

    def decode(self, session: Session, tokens_B, active_B, on_routing=None):
        """Appends one token to each row; returns float32 logits `[B, V]`.

        Args:
          session: after a prefill.
          tokens_B: int32 device array.
          active_B: bool device array; rows that ended cost no expert.
          on_routing: as in `chunks`.
        Raises:
          CapacityError: the session is full.
        """
        x_B1D = self.step(session, tokens_B, active_B, on_routing)
        return self.programs.top.next_head(self.weights.top, x_B1D)

    def step(self, session: Session, tokens_B, active_B, on_routing=None):
        """As `decode`, up to the last hidden states `[B, 1, D]`."""
        session.grow(session.growth)
        self._begin_tokens(session, tokens_B, active_B)
        x, chunk, session.positions_B = self.programs.top.next_embed(
            self.weights.top["embed"],
            tokens_B,
            session.positions_B,
            active_B,
            session.k_B,
        )
        return self._run_layers(session, x, chunk, on_routing)

    def score(self, prompts, on_routing=None):
        """Teacher-forced logits of every position, chunk by chunk.

        Yields:
          (start, float32 `[B, C, V]`) for positions start .. start + C - 1; rows
          shorter than that hold garbage.
        """
        session = self.new_session(len(prompts), max(map(len, prompts), default=0))
        for start, x in self.chunks(session, prompts, on_routing):
            yield start, self.programs.top.head(self.weights.top, x)
