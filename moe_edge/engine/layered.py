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

from moe_edge.core.checks import ConfigError
from moe_edge.engine.assisted import Assist
from moe_edge.engine.base import Engine
from moe_edge.engine.layer_plan import LayerPlan, LayerStep
from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.layer_waves import LayerWaves
from moe_edge.engine.routing_reader import RoutingReader
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights
from moe_edge.model.transformer import layer_window
from moe_edge.offload.manager import OffloadManager
from moe_edge.predict.partial_state import PartialState
from moe_edge.predict.stale_gate import GatePredictor
from moe_edge.route.base import RoutePolicy
from moe_edge.route.topk import TopK
from moe_edge.workload.traces import TraceRecorder


@dataclasses.dataclass
class _Turn:
    """Where the engines of one manager stand.

    Attributes:
      step: counts lookup rounds.
      reader: output of the last program that reads slots.
    """

    step: int = -1
    reader: jax.Array | None = None


class LayeredEngine(Engine):
    """Runs a model whose experts do not fit the device.

    Args:
      weights: all but the experts, on the device.
      manager: brings experts into slots.
      route: chooses what is computed (None: the model's own choice).
      assist: lets the host compute absent experts while others travel.
      trace: collects every lookup, with all scores unless told otherwise.
    """

    def __init__(
        self,
        weights: Weights,
        manager: OffloadManager,
        *,
        route: RoutePolicy | None = None,
        assist: Assist | None = None,
        trace: TraceRecorder | None = None,
        trace_scores: bool = True,
    ):
        config = weights.config
        super().__init__(weights, [(layer,) for layer in range(config.num_layers)])
        self.manager, self.trace, self.assist = manager, trace, assist
        self.route = route or TopK()
        self._slots = manager.queue.slots
        self._run = LayerPrograms(config, self._slots.array.dtype)
        self._waves = LayerWaves(self._run, manager)
        self._windows = [
            jnp.int32(layer_window(config, layer)) for layer in range(config.num_layers)
        ]
        predictor = manager.predictor_run.predictor
        self._is_gate = isinstance(predictor, GatePredictor)
        self._is_partial = isinstance(predictor, PartialState)
        # With assist or a partial state there is work before a layer's experts.
        self._runs_ahead = assist is None and not self._is_partial
        self._is_moe = [
            layer in config.moe_layers for layer in range(config.num_layers)
        ]
        routing_reader = RoutingReader(
            config.moe,
            manager,
            self.route,
            trace,
            trace_scores=trace_scores,
            needs_weights=assist is not None,
        )
        self._plan = LayerPlan(manager, routing_reader, prefetches=not self._is_partial)
        self._turn, self._trace_step = _Turn(), 0

    @property
    def lossless(self) -> bool:
        """Whether tokens are those of the resident engine."""
        return self.route.lossless

    def _programs(self) -> list:
        return [*super()._programs(), *self._run.all()]

    def _sibling(self, weights):
        if self.trace is not None:
            raise ConfigError(
                "a trace has one k, and this engine writes one; load the model with "
                "the k that you want to trace"
            )
        sibling = LayeredEngine(
            weights, self.manager, route=self.route, assist=self.assist
        )
        sibling._turn = self._turn  # they take turns at the same slots
        return sibling

    def close(self) -> None:
        self.manager.queue.close()

    def reset_records(self) -> None:
        self.manager.reset_counters()
        self.manager.recorder.clear()
        if self.trace is not None:
            self.trace.clear()
            self._trace_step = 0

    def restart(self) -> None:
        self.manager.restart()
        self.reset_records()

    def movement(self) -> dict:
        return self.manager.movement()

    def report(self) -> dict:
        helped = 0 if self.assist is None else self.assist.computed
        mode = {"mode": "layered", "route": self.route.name, "lossless": self.lossless}
        return mode | {"host_computed": helped} | self.manager.report()

    def new_session(self, batch: int, capacity: int) -> Session:
        session = super().new_session(batch, capacity)
        self.manager.finish_sequence()
        return session

    def _run_layers(self, session, x, chunk, on_routing):
        length = chunk.valid_BS.shape[1]
        if length == 1 or not session.prefilled:
            self._turn.step += 1  # a prompt is one step, however many chunks
        session.prefilled = True
        state = self._attend(session, 0, x, chunk)
        if self._turn.reader is not None:
            # Nothing above depends on the last step's experts where the caller knows
            # its tokens beforehand, and slots that a program reads must not change.
            self._turn.reader.block_until_ready()
        for layer in range(self.config.num_layers):
            if not self._is_moe[layer]:
                if layer + 1 < self.config.num_layers:
                    state = self._attend(session, layer + 1, state, chunk)
                continue
            state = self._moe_layer(session, layer, state, chunk, on_routing)
        self._turn.reader = state
        self._trace_step += length
        return state

    def _layer_arguments(self, session, layer: int, chunk) -> tuple:
        gates = ()
        is_decode = chunk.valid_BS.shape[1] == 1
        if self._is_gate and is_decode and self._is_moe[layer]:
            gates = self.manager.predictor_run.predictor.gates_after(layer)
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
        self._plan.note_dispatch()
        return state

    def _moe_layer(self, session, layer, routed: Routed, chunk, on_routing):
        """Plans and dispatches a layer's experts and the next layer's attention."""
        plan, manager = self._plan, self.manager
        at = LayerStep(layer, self._turn.step, chunk.valid_BS.shape, self._trace_step)
        if not self._slots.safe_in_thread:
            manager.queue.poll()  # what has arrived goes into its slots
        reading = plan.routing_reader.read(at.layer, routed, at.shape_BS)
        plan.note_compute(at)
        if on_routing is not None:
            on_routing(layer, routed.routing)
        pairs = self._run.is_pairs(len(reading.ids_TK))
        if at.is_decode and pairs and self._runs_ahead:
            slot_TK = manager.ready_slots(layer, reading.ids_TK)
            if slot_TK is not None:
                # Nothing to wait for: the device first, the books meanwhile.
                state = self._dispatch(session, layer, routed, slot_TK, reading, chunk)
                plan.note_ready(at, reading)
                return state
        choice = plan.look_up(at, reading)
        if not (pairs and plan.fits(at, choice)):
            demanded = manager.demanded
            x, waited_s = self._waves.run(layer, routed, choice, at.step, at.is_decode)
            plan.record(at, choice, demanded, waited_s)
            is_last = layer + 1 == self.config.num_layers
            return x if is_last else self._attend(session, layer + 1, x, chunk)
        absent, helped, host_TD = choice.misses, [], None
        if self.assist is not None and at.is_decode:
            absent, helped = self.assist.split(absent)

        def meanwhile():
            nonlocal host_TD
            if self._is_partial and at.is_decode:
                self._peek(session, at, routed, choice, chunk)
            if self.assist is not None:
                host_TD = self.assist.run(layer, helped, routed, choice)

        slot_TK, fetched, had_to_wait = plan.bring(at, choice, absent, meanwhile)
        if self.assist is not None:
            self.assist.note(fetched)
        if helped:
            # One may be on its way for the next token already: not for this one.
            slot_TK[np.isin(choice.ids_TK, helped)] = self._slots.num_slots
        state = self._dispatch(session, layer, routed, slot_TK, choice, chunk, host_TD)
        if not had_to_wait:
            plan.prefetch(at)
        return state

    def _dispatch(self, session, layer, routed, slot_TK, choice, chunk, host_TD=None):
        """A layer's experts, which stand in slots, and the next layer's attention."""
        if layer + 1 == self.config.num_layers:
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
        self._plan.note_dispatch()
        return state

    def _peek(self, session, at: LayerStep, routed, choice, chunk) -> None:
        """SMoE's prefetch: the next layer's choice on the state that is ready."""
        manager, layer = self.manager, at.layer
        if layer + 1 == self.config.num_layers or not self._is_moe[layer + 1]:
            return
        slot_TK = manager.slots_TK(layer, choice.ids_TK, arrived_only=True)
        params, _, chunk, window, cache = self._layer_arguments(
            session, layer + 1, chunk
        )
        wanted_E = self._run.peek(
            routed,
            slot_TK,
            choice.weights_TK,
            self._slots.array,
            params,
            chunk,
            window,
            cache,
            top_a=manager.predictor_run.predictor.top_a,
        )
        manager.predictor_run.store(layer, np.asarray(wanted_E)[None])
        manager.prefetch(layer, at.step)
