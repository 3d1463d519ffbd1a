"""The resident engine: all weights on the device, steps as a few jitted programs.

A step is a fixed sequence of programs: embed, groups of layers, head. One program
serves every group of the same kinds of layers, so a deep model compiles quickly;
shapes depend on batch, chunk and cache capacity only, so nothing is compiled while
a sequence grows. It is the oracle that every offloaded mode is compared with.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import CapacityError
from moe_edge.engine.session import (
    Session,
    capacity_for,
    check_prompts,
    plan_chunks,
)
from moe_edge.engine.weights import Weights, bind_block, block_graph
from moe_edge.model import kv_cache
from moe_edge.model.experts import run_experts
from moe_edge.model.matvec import compiler_options
from moe_edge.model.record import RecordLayout
from moe_edge.model.router import Routing
from moe_edge.model.transformer import (
    embed_tokens,
    layer_window,
    logits_of,
    make_chunk,
)

# Called with (layer, Routing) after a step; arrays are still on the device.
RoutingCallback = Callable[[int, Routing], None]


class ResidentEngine:
    """Runs a model whose weights all fit the device.

    Args:
      weights: the model.
      layers_per_program: how many layers one jitted program holds.
      expert_method: forces one of `experts.METHODS` (None: chosen by size).
    """

    def __init__(
        self,
        weights: Weights,
        *,
        layers_per_program: int = 1,
        expert_method: str | None = None,
    ):
        config = weights.config
        self.config, self.weights = config, weights
        moe, layout = config.moe, RecordLayout.of(config)
        self._run_experts = functools.partial(
            run_experts,
            layout=layout,
            activation=moe.activation,
            swiglu_limit=moe.swiglu_limit,
            method=expert_method,
        )
        self._graphs = {kind: block_graph(config, kind) for kind in (False, True)}
        size = layers_per_program
        self._groups = [
            tuple(range(first, min(first + size, config.num_layers)))
            for first in range(0, config.num_layers, size)
        ]
        self._windows = [
            jnp.asarray([layer_window(config, layer) for layer in group], jnp.int32)
            for group in self._groups
        ]
        jit = functools.partial(jax.jit, compiler_options=compiler_options())
        self._layers = jit(
            self._layers_step, static_argnames="kinds", donate_argnames="caches"
        )
        self._embed = jit(self._embed_step)
        self._head = jit(self._head_step)
        self._next_embed = jit(self._next_embed_step)
        self._next_head = jit(lambda top, x_B1D: self._head_step(top, x_B1D[:, 0]))
        self._last = jit(_pick_last)

    # Programs: pure functions of arrays, traced once per shape.

    def _embed_step(self, embed_VD, tokens_BS, start_B, valid_BS):
        chunk = make_chunk(self.config, start_B, valid_BS)
        return embed_tokens(embed_VD, tokens_BS), chunk

    def _next_embed_step(self, embed_VD, tokens_B, positions_B, active_B):
        x_B1D, chunk = self._embed_step(
            embed_VD, tokens_B[:, None], positions_B, active_B[:, None]
        )
        return x_B1D, chunk, positions_B + 1

    def _layers_step(self, kinds, layers, experts, x_BSD, chunk, windows, caches):
        new_caches, routings = [], []
        for i, is_moe in enumerate(kinds):
            block = bind_block(self._graphs[is_moe], layers[i])
            x_BSD, cache, routing = block(
                x_BSD, chunk, windows[i], experts[i], self._run_experts, caches[i]
            )
            new_caches.append(cache)
            routings.append(routing)
        return x_BSD, tuple(new_caches), tuple(routings)

    def _head_step(self, top, x):
        """x `[..., D]` -> logits `[..., V]`."""
        head = top["embed"] if self.config.tie_embeddings else top["head"]
        return logits_of(x, top["final_norm"], head, self.config.norm_eps)

    def num_compiled(self) -> int:
        """How many programs have been compiled so far (all shapes)."""
        programs = (
            self._embed,
            self._next_embed,
            self._layers,
            self._head,
            self._next_head,
            self._last,
        )
        return sum(program._cache_size() for program in programs)

    # Steps.

    def new_session(self, batch: int, capacity: int) -> Session:
        """Empty caches for `batch` sequences of up to `capacity` tokens.

        Raises:
          CapacityError: more than the model's context.
        """
        if capacity > self.config.max_positions:
            raise CapacityError(
                f"{capacity} tokens (prompt and new) exceed the model's context of "
                f"{self.config.max_positions}; shorten the prompt or ask for fewer"
            )
        capacity = capacity_for(capacity)
        caches = [
            tuple(kv_cache.empty_cache(self.config, batch, capacity) for _ in group)
            for group in self._groups
        ]
        return Session(caches, jnp.zeros(batch, jnp.int32), capacity)

    def _run_layers(self, session, x, chunk, on_routing):
        weights = self.weights
        for i, group in enumerate(self._groups):
            x, session.caches[i], routings = self._layers(
                tuple(weights.experts[layer] is not None for layer in group),
                tuple(weights.layers[layer] for layer in group),
                tuple(weights.experts[layer] for layer in group),
                x,
                chunk,
                self._windows[i],
                session.caches[i],
            )
            if on_routing is not None:
                for layer, routing in zip(group, routings, strict=True):
                    if routing is not None:
                        on_routing(layer, routing)
        return x

    def chunks(self, session: Session, prompts, on_routing=None):
        """Runs prompts chunk by chunk from the start of an empty session.

        Args:
          session: fresh, of as many rows as prompts.
          prompts: token ids of each row, of unequal lengths.
          on_routing: receives the routing of every MoE layer.
        Yields:
          (start, x_BCD): position of the chunk and its last hidden states; rows
          are right-padded.
        Raises:
          RequestError: an empty prompt, or a token outside the vocabulary.
          CapacityError: a prompt longer than the session, or one already used.
        """
        lengths = check_prompts(prompts, self.config.vocab_size)
        if session.used:
            raise CapacityError("prefill needs a fresh session; open a new one")
        session.grow(max(lengths))
        chunks = plan_chunks(max(lengths), session.capacity)
        padded = sum(chunks[-1])
        tokens = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        lengths = np.asarray(lengths, np.int32)
        valid = np.arange(padded)[None, :] < lengths[:, None]
        for start, size in chunks:
            x, chunk = self._embed(
                self.weights.top["embed"],
                jax.device_put(tokens[:, start : start + size]),
                jax.device_put(np.full(len(prompts), start, np.int32)),
                jax.device_put(valid[:, start : start + size]),
            )
            yield start, self._run_layers(session, x, chunk, on_routing)
        session.positions_B = jax.device_put(lengths)

    def prefill(self, session: Session, prompts, on_routing=None) -> jax.Array:
        """Logits after the last token of each prompt, float32 `[B, V]`."""
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        last = jnp.zeros((len(prompts), self.config.d_model), jnp.float32)
        for start, x in self.chunks(session, prompts, on_routing):
            last = self._last(x, last, jax.device_put(lengths - 1 - start))
        return self._head(self.weights.top, last)

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
        session.grow(1)
        top = self.weights.top
        x, chunk, session.positions_B = self._next_embed(
            top["embed"], tokens_B, session.positions_B, active_B
        )
        x = self._run_layers(session, x, chunk, on_routing)
        return self._next_head(top, x)

    def score(self, prompts, on_routing=None):
        """Teacher-forced logits of every position, chunk by chunk.

        Yields:
          (start, float32 `[B, C, V]`) for positions start .. start + C - 1; rows
          shorter than that hold garbage.
        """
        session = self.new_session(len(prompts), max(map(len, prompts), default=0))
        for start, x in self.chunks(session, prompts, on_routing):
            yield start, self._head(self.weights.top, x)


def _pick_last(x_BSD, last_BD, index_B):
    """Row b of `last` becomes x[b, index_B[b]] where that lies in the chunk."""
    S = x_BSD.shape[1]
    inside_B = (index_B >= 0) & (index_B < S)
    at_B11 = jnp.clip(index_B, 0, S - 1)[:, None, None]
    picked_BD = jnp.take_along_axis(x_BSD, at_B11, axis=1)[:, 0]
    return jnp.where(inside_B[:, None], picked_BD, last_BD)
