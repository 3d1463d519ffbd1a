"""Fidelity and lookups of lossy routes, a layer at a time over all tokens of a text.

A decode step reads each layer's experts for one token. Where every layer has slots of
its own and nothing is prefetched, a layer's cache depends on its own lookups alone.
So all tokens may pass a layer before any passes the next: the host walks through its
lookups in their order, as decode steps would, and the device computes all tokens at
once. The same choices, hits and misses as token by token (a test holds them equal), and
the same logits up to rounding.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.core.interrupts import check_interrupt
from moe_edge.core.progress import progress
from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.programs import jit_step
from moe_edge.engine.resident import ResidentEngine
from moe_edge.evaluate.likelihood import score_logits
from moe_edge.evaluate.stepwise import ForcedRun
from moe_edge.evaluate.texts import spread_rows
from moe_edge.model.transformer import layer_window
from moe_edge.offload.evict_base import CacheSpec, Eviction
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.route.base import Route, TopK, gate_scores, host_choice
from moe_edge.workload.traces import DECODE, Trace, ordered_trace

ROWS = 4  # that pass a program together


class Cached(NamedTuple):
    """What decides which experts are in slots.

    Attributes:
      eviction: the policy.
      slots: of each MoE layer.
    """

    eviction: Eviction
    slots: int


class Placed(NamedTuple):
    """What one server of several holds: its misses are calls to others.

    Attributes:
      held_LE: bool, which experts it has.
    """

    held_LE: np.ndarray


@dataclasses.dataclass(frozen=True)
class LayerwiseRun:
    """What the tokens of a text gave.

    Attributes:
      forced: log-probabilities of each row's tokens from its second on.
      trace: every lookup with the scores of all experts, a decode step a token.
      misses: transfers a token, over all layers; 0 without a cache.
      changed_ratio: share of the model's choices that the route changed.
    """

    forced: ForcedRun
    trace: Trace
    misses: float
    changed_ratio: float


class LayerwiseText:
    """Rows of tokens, and the model that reads them.

    Args:
      engine: resident, whose weights and config are used.
      tokens_NS: int32, rows of one length.
    Raises:
      ConfigError: a model of layers that keep a state, or without experts.
      RequestError: rows of less than two tokens.
    """

    def __init__(self, engine: ResidentEngine, tokens_NS: np.ndarray):
        config = engine.config
        if not config.moe_layers:
            raise ConfigError("this is a dense model, which no route changes")
        if any(config.attention_of(i).has_state for i in range(config.num_layers)):
            raise ConfigError(
                f"{config.model_type} has layers that keep a state; score it token by "
                "token (moe-edge fidelity)"
            )
        if tokens_NS.ndim != 2 or tokens_NS.shape[1] < 2:
            raise RequestError(
                f"rows of tokens have shape {tokens_NS.shape}, expected [N, S] with S "
                "from 2: the first token is never scored"
            )
        self.engine, self.config = engine, config
        self.tokens_NS = np.asarray(tokens_NS, np.int32)
        weights = engine.weights
        stored = weights.experts[config.moe_layers[0]]
        self._programs = LayerPrograms(config, stored.dtype)
        self._score = jit_step(self._score_step)

    def run(
        self, route: Route | None = None, cached: Cached | Placed | None = None
    ) -> LayerwiseRun:
        """Scores the rows, one after another over one cache, which begins empty.

        Args:
          route: of every token; None: the model's own choice.
          cached: None: all experts are in slots, and no lookup misses.
        """
        N, S = self.tokens_NS.shape
        walk = _Walk(self.config, route or TopK(), cached)
        parts = [
            jax.device_put(self.tokens_NS[first : first + ROWS])
            for first in range(0, N, ROWS)
        ]
        embed = self.engine.weights.top["embed"]
        chunks, states = [], []
        for part in parts:
            start_B = jnp.zeros(len(part), jnp.int32)
            valid_BS = jnp.ones(part.shape, bool)
            x_BSD, chunk = self._programs.top.embed(embed, part, start_B, valid_BS)
            states.append(x_BSD)
            chunks.append(chunk)
        for layer in progress(range(self.config.num_layers), "layers of a text"):
            check_interrupt()
            states = self._layer(layer, states, chunks, walk)
        log_probs, best = [], []
        for part, x_BSD in zip(parts, states, strict=True):
            log_BS, best_BS = self._score(self.engine.weights.top, x_BSD, part)
            log_probs += [*np.asarray(log_BS)[:, :-1]]
            best += [*np.asarray(best_BS)[:, :-1]]
        forced = ForcedRun(log_probs, best, N * S, [], 0)
        misses = walk.misses / (N * S)
        return LayerwiseRun(forced, walk.trace(S), misses, walk.changed_ratio)

    def _layer(self, layer: int, states: list, chunks: list, walk: "_Walk") -> list:
        """All tokens pass a layer: attention, the host's walk, experts."""
        config, programs, weights = self.config, self._programs, self.engine.weights
        kind, S = programs.kinds[layer], self.tokens_NS.shape[1]
        window, params = jnp.int32(layer_window(config, layer)), weights.layers[layer]
        routed = []
        for x_BSD, chunk in zip(states, chunks, strict=True):
            cache = self.engine.new_cache(layer, len(x_BSD), S)
            state, _ = programs.attend(kind, x_BSD, params, (), chunk, window, cache)
            routed.append(state)
        if layer not in config.moe_layers:
            return routed
        own = zip(*(state.routing for state in routed), strict=True)
        joined = (np.concatenate([*map(np.asarray, arrays)]) for arrays in own)
        ids_TK, weights_TK = walk.layer(layer, *joined)
        slot_E = np.arange(config.moe.num_experts, dtype=np.int32)
        found, first = [], 0
        for state in routed:
            part = slice(first, first := first + len(state.routing.ids_TK))
            state = with_ids(state, ids_TK[part])
            pairs = programs.is_pairs(len(ids_TK[part]))
            slot_of = ids_TK[part] if pairs else slot_E
            chosen = slot_of, jax.device_put(weights_TK[part]), weights.experts[layer]
            found.append(programs.experts(state, *chosen))
        return found

    def _score_step(self, top, x_BSD, tokens_BS):
        """Log-probability of each position's next token, and the likeliest."""
        logits = self._programs.top.head_step(top, x_BSD)
        return score_logits(logits, jnp.roll(tokens_BS, -1, axis=1))


def with_ids(state: Routed, ids_TK: np.ndarray) -> Routed:
    """A routed layer whose tokens have chosen others."""
    routing = state.routing._replace(ids_TK=jax.device_put(ids_TK))
    return state._replace(routing=routing)


class _Walk:
    """The host's part: routes and lookups of one layer after another."""

    def __init__(self, config, route: Route, cached: Cached | Placed | None):
        self._moe, self._route, self._cache = config.moe, route, None
        self._held_LE = cached.held_LE if isinstance(cached, Placed) else None
        if isinstance(cached, Cached):
            layer_S = np.repeat(config.moe_layers, cached.slots).tolist()
            sizes = config.num_layers, config.moe.num_experts, config.moe.top_k
            spec = CacheSpec(*sizes, tuple(layer_S))
            self._cache = SlotCache(spec, cached.eviction)
        self.misses = self._changed = self._chosen = 0
        self._columns: list[dict[str, np.ndarray]] = []

    @property
    def changed_ratio(self) -> float:
        """Share of the model's choices that the route changed."""
        return self._changed / max(1, self._chosen)

    def layer(self, layer: int, ids_TK, weights_TK, scores_TE):
        """What is computed of a layer's tokens: (ids_TK, weights_TK)."""
        own_TK, ids_TK = ids_TK, np.array(ids_TK)
        weights_TK = np.array(weights_TK)
        shares_TE = np.asarray(gate_scores(scores_TE, self._moe))
        hit_TK = np.ones(ids_TK.shape, bool)
        E, is_lossy = self._moe.num_experts, type(self._route) is not TopK
        for t in range(len(ids_TK)):
            one = slice(t, t + 1)
            if is_lossy:
                seen = scores_TE[one], self._here(layer), self._moe
                ids_TK[one], weights_TK[one] = host_choice(
                    self._route, layer, *seen, ids_TK[one], weights_TK[one]
                )
            if missed := self._look_up(layer, ids_TK[one], shares_TE[one], t):
                hit_TK[t] = [expert not in missed for expert in ids_TK[t].tolist()]
                self.misses += len(missed)
        self._changed += int(np.count_nonzero(ids_TK != own_TK))
        self._chosen += int(np.count_nonzero(own_TK < E))
        self._columns.append(
            {
                "step": np.arange(len(ids_TK), dtype=np.int32),
                "layer": np.full(len(ids_TK), layer, np.int32),
                "ids_TK": np.where(ids_TK < E, ids_TK, -1),
                "weights_TK": weights_TK,
                "hit_TK": hit_TK,
                "scores_TE": shares_TE.astype(np.float16),
            }
        )
        return ids_TK, weights_TK

    def _here(self, layer: int) -> np.ndarray:
        """bool [E]: what costs no transfer and no call."""
        if self._cache is not None:
            return self._cache.resident(layer)
        if self._held_LE is not None:
            return self._held_LE[layer]
        return np.ones(self._moe.num_experts, bool)

    def _look_up(self, layer: int, ids_1K, shares_1E, step: int) -> list[int]:
        """What a lookup had to fetch, which is in slots now, or to ask others for."""
        if self._cache is None:
            if self._held_LE is None:
                return []
            ids = ids_1K[ids_1K < self._moe.num_experts]
            return ids[~self._held_LE[layer, ids]].tolist()
        misses = self._cache.look_up(layer, ids_1K, shares_1E, step).misses
        for expert in misses:
            self._cache.admit(layer, expert)
        return misses

    def trace(self, length: int) -> Trace:
        """All lookups, in the order of decode steps; a request a row."""
        columns = {
            name: np.concatenate([part[name] for part in self._columns])
            for name in self._columns[0]
        }
        columns["request"] = columns["step"] // length
        columns["phase"] = np.full(len(columns["step"]), DECODE, np.int32)
        return ordered_trace(self._moe.num_experts, self._moe.top_k, **columns)


def cut_tokens(ids: Sequence[int], tokens: int, length: int) -> np.ndarray:
    """Rows of a text, [N, length] of at least `tokens` scored ones, spread evenly.

    Raises:
      RequestError: the text is too short.
    """
    return np.array(spread_rows(ids, -(-tokens // (length - 1)), length), np.int32)
