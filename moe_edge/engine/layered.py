"""The layered engine: experts live on the host, which plans every layer's transfers.

At each MoE layer the host reads the routing, lets a route policy change it, asks the
offload manager for what is missing and for what a predictor expects, and dispatches
the next program when the blocks are in their slots. Lossless unless the route policy
is not: the same kernels in the same order as the resident engine.

A layer whose chosen experts do not fit the slots at once runs in waves.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.engine.assisted import Assist
from moe_edge.engine.base import Engine
from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.layer_waves import LayerWaves
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights
from moe_edge.model.transformer import layer_window
from moe_edge.offload.manager import OffloadManager
from moe_edge.predict.partial_state import PartialState
from moe_edge.predict.stale_gate import GatePredictor
from moe_edge.route.base import RoutePolicy, gate_scores
from moe_edge.route.topk import TopK
from moe_edge.workload.traces import DECODE, PREFILL, TraceRecorder


@dataclasses.dataclass
class Choice:
    """What a layer computes, on the host and on the device."""

    ids_TK: np.ndarray
    weights_TK: jax.Array
    hits: np.ndarray
    misses: np.ndarray


class LayeredEngine(Engine):
    """Runs a model whose experts do not fit the device.

    Args:
      weights: all but the experts, on the device.
      manager: brings experts into slots.
      route: chooses what is computed (None: the model's own choice).
      assist: lets the host compute absent experts while others travel.
      trace: collects every lookup.
    """

    def __init__(
        self,
        weights: Weights,
        manager: OffloadManager,
        *,
        route: RoutePolicy | None = None,
        assist: Assist | None = None,
        trace: TraceRecorder | None = None,
    ):
        config = weights.config
        super().__init__(weights, [(layer,) for layer in range(config.num_layers)])
        self.manager, self.trace, self.assist = manager, trace, assist
        self.route = route or TopK()
        self._slots = manager.mover.slots
        self._run = LayerPrograms(config, self._slots.array.dtype)
        self._waves = LayerWaves(self._run, manager)
        self._windows = [
            jnp.int32(layer_window(config, layer)) for layer in range(config.num_layers)
        ]
        predictor = manager.predictor
        self._is_gate = isinstance(predictor, GatePredictor)
        self._is_partial = isinstance(predictor, PartialState)
        self._is_moe = [
            layer in config.moe_layers for layer in range(config.num_layers)
        ]
        policy = manager.cache.policy
        self._needs_scores = (
            "scores" in policy.needs or self.route.needs_resident or trace is not None
        )
        self._step = self._trace_step = 0

    @property
    def lossless(self) -> bool:
        """Whether tokens are those of the resident engine."""
        return self.route.lossless

    def _programs(self) -> list:
        return [*super()._programs(), *self._run.all()]

    def reset_records(self) -> None:
        self.manager.reset_counters()
        self.manager.recorder.clear()
        if self.trace is not None:
            self.trace.clear()

    def movement(self) -> dict:
        return self.manager.movement()

    def new_session(self, batch: int, capacity: int) -> Session:
        session = super().new_session(batch, capacity)
        self.manager.finish_sequence()
        return session

    def _run_layers(self, session, x, chunk, on_routing):
        self._batch, length = chunk.valid_BS.shape
        is_decode = length == 1
        state = self._attend(session, 0, x, chunk)
        for layer in range(self.config.num_layers):
            if not self._is_moe[layer]:
                if layer + 1 < self.config.num_layers:
                    state = self._attend(session, layer + 1, state, chunk)
                continue
            state = self._moe_layer(session, layer, state, chunk, is_decode, on_routing)
        self._step += 1
        self._trace_step += length
        return state

    def _layer_arguments(self, session, layer: int, chunk) -> tuple:
        gates = ()
        if self._is_gate and self._is_moe[layer]:
            gates = self.manager.predictor.gates_after(layer)
        cache = session.caches[layer][0]
        return self.weights.layers[layer], gates, chunk, self._windows[layer], cache

    def _attend(self, session, layer: int, x, chunk):
        params, gates, chunk, window, cache = self._layer_arguments(
            session, layer, chunk
        )
        state, cache = self._run.attend(
            self._is_moe[layer], params, gates, x, chunk, window, cache
        )
        session.caches[layer] = (cache,)
        return state

    def _moe_layer(self, session, layer, routed: Routed, chunk, is_decode, on_routing):
        """Plans and dispatches a layer's experts and the next layer's attention."""
        choice = self._choose(layer, routed, chunk.valid_BS.shape)
        if on_routing is not None:
            on_routing(layer, routed.routing)
        manager, is_last = self.manager, layer + 1 == self.config.num_layers
        distinct = len(choice.hits) + len(choice.misses)
        pairs = self._run.waves(choice.ids_TK.shape[0]).method == "pairs"
        fits = distinct <= manager.room(layer)
        host_TD = None
        if pairs and fits:
            tickets = manager.arriving(layer, choice.hits)
            absent, helped = choice.misses, []
            if self.assist is not None and is_decode:
                absent, helped = self.assist.split(absent)
            fetched = manager.fetch(layer, absent, self._step)
            fits = len(fetched) == len(absent)
            tickets += fetched
        if not (pairs and fits):
            x, waited_s = self._waves.run(layer, routed, choice, self._step, is_decode)
            self._record(layer, choice, waited_s, is_decode)
            return x if is_last else self._attend(session, layer + 1, x, chunk)
        if is_decode and not self._is_partial:
            manager.prefetch(layer, self._step)
        if is_decode and self._is_partial and not is_last and self._is_moe[layer + 1]:
            self._peek(session, layer, routed, choice, chunk)
        if helped:
            host_TD = self.assist.start(layer, helped, routed, choice)
        waited_s = manager.wait(tickets, layer, self._step, is_decode)
        if self.assist is not None:
            self.assist.note(fetched)
        self._record(layer, choice, waited_s, is_decode)
        slot_TK = jax.device_put(manager.slots_TK(layer, choice.ids_TK))
        if is_last:
            return self._run.experts(
                routed, slot_TK, choice.weights_TK, self._slots.array, host_TD
            )
        params, gates, chunk, window, cache = self._layer_arguments(
            session, layer + 1, chunk
        )
        state, cache = self._run.advance(
            self._is_moe[layer + 1],
            routed,
            slot_TK,
            choice.weights_TK,
            self._slots.array,
            params,
            gates,
            chunk,
            window,
            cache,
            host_TD,
        )
        session.caches[layer + 1] = (cache,)
        return state

    def _choose(self, layer: int, routed: Routed, shape_BS) -> Choice:
        """Reads the routing (the one wait of a layer) and looks it up."""
        manager, routing = self.manager, routed.routing
        is_decode = shape_BS[1] == 1
        wanted = [routing.ids_TK, routing.weights_TK]
        if self._needs_scores:
            wanted.append(routing.scores_TE)
        if self._is_gate:
            wanted.append(routed.wanted_NE)
        read = jax.device_get(wanted)
        ids_TK, weights_TK = read[:2]
        scores_TE = read[2] if self._needs_scores else None
        weights = routing.weights_TK
        if self.route.needs_resident and is_decode:
            resident_E = manager.cache.resident(layer)
            moe = self.config.moe
            ids_TK, weights_TK = self.route.route(
                layer, scores_TE, resident_E, moe, ids_TK, weights_TK
            )
            weights = jax.device_put(weights_TK)
        shares_TE = None
        if scores_TE is not None:
            shares_TE = gate_scores(scores_TE, self.config.moe)
        hits, misses = manager.look_up(layer, ids_TK, shares_TE, self._step, is_decode)
        if is_decode or manager.predictor.whole_prompt:
            manager.observe(layer, ids_TK, scores_TE)
        else:
            last_B = last_tokens(ids_TK, shape_BS, self.config.moe.num_experts)
            manager.observe(layer, ids_TK[last_B], None)
        if self._is_gate and is_decode:
            predictor = manager.predictor
            manager.update(lambda state: predictor.store(state, layer, read[-1]))
        choice = Choice(ids_TK, weights, hits, misses)
        self._host = weights_TK, scores_TE
        return choice

    def _peek(self, session, layer, routed, choice, chunk) -> None:
        """SMoE's prefetch: the next layer's choice on the state that is ready."""
        manager, predictor = self.manager, self.manager.predictor
        slot_TK = manager.slots_TK(layer, choice.ids_TK)
        absent_TK = np.isin(choice.ids_TK, choice.misses)
        slot_TK[absent_TK] = self._slots.num_slots
        params, _, chunk, window, cache = self._layer_arguments(
            session, layer + 1, chunk
        )
        wanted_E = self._run.peek(
            routed,
            jax.device_put(slot_TK),
            choice.weights_TK,
            self._slots.array,
            params,
            chunk,
            window,
            cache,
            top_a=predictor.top_a,
        )
        wanted_1E = np.asarray(wanted_E)[None]
        manager.update(lambda state: predictor.store(state, layer, wanted_1E))
        manager.prefetch(layer, self._step)

    def _record(self, layer: int, choice: Choice, waited_s: float, is_decode) -> None:
        if self.trace is None:
            return
        weights_TK, scores_TE = self._host
        moved = len(choice.misses) * self.manager.mover.store.block_bytes
        T, B = len(choice.ids_TK), self._batch
        self.trace.add(
            DECODE if is_decode else PREFILL,
            self._trace_step + np.arange(T) % (T // B),
            layer,
            choice.ids_TK,
            weights_TK,
            np.isin(choice.ids_TK, choice.hits),
            moved,
            waited_s,
            scores_TE,
            np.arange(T) // (T // B),
        )


def last_tokens(ids_TK: np.ndarray, shape_BS, num_experts: int) -> np.ndarray:
    """Index of the last real token of every row that has one; padding is id E."""
    B, S = shape_BS
    real_BS = ids_TK[:, 0].reshape(B, S) < num_experts
    last_B = S - 1 - np.argmax(real_BS[:, ::-1], axis=1)
    return (np.arange(B) * S + last_B)[real_BS.any(axis=1)]
