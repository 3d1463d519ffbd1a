"""The layered engine: experts live on the host, which plans every layer's transfers.

At each MoE layer the host reads the routing, lets a route policy change it, asks the
layer step for what is missing and for what a predictor expects, and dispatches the
next program when the blocks are in their slots. Lossless unless the route policy
is not: the same kernels in the same order as the resident engine.

A layer whose chosen experts do not fit the slots at once runs in waves.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.engine.backends import Backend
from moe_edge.engine.base import Engine
from moe_edge.engine.companion import Choices, Companion
from moe_edge.engine.homes import exchange_of
from moe_edge.engine.inline import is_inline
from moe_edge.engine.layer_exchange import LayerCalls, Words
from moe_edge.engine.layer_help import LayerHelp
from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.layer_report import LayerReport
from moe_edge.engine.layer_waves import LayerWaves
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.engine.routing_reader import Reading, RoutingReader
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.layer_visit import LayerVisit
from moe_edge.offload.slots import is_lost
from moe_edge.predict.base import NOT_WANTED, rank_scores
from moe_edge.route.base import Route, TopK
from moe_edge.workload.traces import TraceRecorder


@dataclasses.dataclass
class _Turn:
    """Where the engines of one `LayerStep` stand."""

    step: int = -1  # counts lookup rounds
    # Output of the last program that reads slots: an array after a step, in the middle
    # of one perhaps several.
    reader: Any = None
    sessions: weakref.WeakSet[Session] = dataclasses.field(
        default_factory=weakref.WeakSet  # those that somebody still holds
    )


class LayeredEngine(LayerReport, Engine):
    """Runs a model whose experts do not fit the device.

    Args:
      weights: all but the experts, on the device.
      route: chooses what is computed in decoding (None: the model's own choice).
      backends: compute absent experts elsewhere while others travel; asked in order.
      trace: collects every lookup, with all scores unless told otherwise.
      programs: of another engine of this model, instead of new ones.
      shadow: runs beside this engine; for predictors that need one.
      in_words: host and programs exchange words in pinned memory (`layer_words`).

    Where experts have homes (`HomeSlots`) the first home's device runs all but them.
    """

    programs: LayerPrograms

    def __init__(
        self,
        weights: Weights,
        layer_step: LayerStep,
        *,
        route: Route | None = None,
        backends: Sequence[Backend] = (),
        trace: TraceRecorder | None = None,
        trace_scores: bool = True,
        programs: LayerPrograms | None = None,
        shadow: Companion | None = None,
        in_words: bool = False,
    ):
        config = weights.config
        self.layer_step, self.trace = layer_step, trace
        self.cache, self.queue = layer_step.cache, layer_step.queue
        self.predictor_run = layer_step.predictor_run
        self.statistics = layer_step.statistics
        self._residency, self._slots = layer_step.residency, self.queue.slots
        self._exchange = exchange_of(self.cache.homes, self._slots, in_words)
        weights = self._exchange.weights(weights)
        programs = programs or LayerPrograms(config, self._slots.dtype)
        programs.check_records(self._slots.dtype)
        super().__init__(weights, programs)
        self._windows = self._exchange.windows(self._windows)
        self.backends, self.route = tuple(backends), route or TopK()
        # Where programs run in this thread, transfers are requested before the
        # dispatch, so that they overlap it.
        self._plans_first = is_inline()
        given = programs, layer_step, self._exchange, self._plans_first
        self._waves = LayerWaves(*given)
        self.predictor_run.moe_layers = config.moe_layers
        self._predictor = self.predictor_run.predictor
        peeks = "partial_state" in self._predictor.needs
        self._help = LayerHelp(layer_step, self.backends, peeks)
        self._is_moe = [i in config.moe_layers for i in range(config.num_layers)]
        needs = {"trace_scores": trace_scores, "needs_weights": bool(self.backends)}
        given = config.moe, layer_step, self.route, trace
        self._reader = RoutingReader(*given, **needs)
        # What is called for layers whose experts all stand in slots.
        steps = self._exchange.steps(programs, self._reader.reads)
        given = self.weights, self._windows, self._exchange, steps, self._slots
        dispatched = self.predictor_run, self._reader.note_dispatch
        self._calls = LayerCalls(*given, *dispatched)
        self._turn = _Turn()
        self.shadow = shadow
        self._foreseen: Choices | None = None  # what it chose for the running token
        self._is_crowded = False

    @property
    def lossless(self) -> bool:
        return self.route.lossless

    def _sibling(self, weights):
        if self.trace is not None:
            raise ConfigError(
                "a trace has one k, and this engine writes one; load the model with "
                "the k that you want to trace"
            )
        dtype, top = self._slots.dtype, self.programs.top
        sibling = LayeredEngine(
            weights,
            self.layer_step,
            route=self.route,
            backends=self.backends,
            programs=LayerPrograms(weights.config, dtype, top),
            shadow=self.shadow and self.shadow.at_k(weights.config.moe.top_k),
            in_words=isinstance(self._exchange, Words),
        )
        sibling._turn = self._turn  # they take turns at the same slots
        return sibling

    def put(self, tree):
        return self._exchange.put(tree)

    def num_compiled(self) -> int:
        own = super().num_compiled()
        return own + (self.shadow.num_compiled() if self.shadow else 0)

    def close(self) -> None:
        self.queue.close()

    def reset_records(self) -> None:
        self.layer_step.reset_counters()
        for backend in self.backends:
            backend.reset()
        self._reader.clear()

    def restart(self) -> None:
        self.layer_step.restart()
        self.reset_records()

    def recover(self) -> None:
        # Slots that a program still reads must not change.
        is_lost((self._turn.reader, self._waves.last))
        self._turn.reader = self._waves.last = self._foreseen = None
        self.layer_step.recover()

    def check_rows(self, deterministic: bool = False) -> None:
        refuse(
            Asked(
                eviction=self.cache.policy,
                predictor=self._predictor,
                route=self.route,
                recorded=self.trace is not None,
                is_assisted=bool(self.backends),
                has_rows=True,
                deterministic=deterministic,
            )
        )

    @contextlib.contextmanager
    def crowded(self):
        self._is_crowded = True
        try:
            yield
        finally:
            self._is_crowded = False

    def _must_fit(self, layer: int, ids_TK) -> bool:
        """Whether a layer runs at once if its experts fit; else in waves anyway."""
        return not self._is_crowded or self.cache.surely_fits(layer, ids_TK.size)

    def new_session(
        self, batch: int, capacity: int, with_caches: bool = True
    ) -> Session:
        """As `Engine.new_session`.

        Sessions may take turns: policies and predictors with a record per sequence
        have one for each. The records of a session that is gone end here, and what is
        on its way, if nobody else runs.
        """
        session = super().new_session(batch, capacity, with_caches)
        sessions = self._turn.sessions
        if sessions:
            self.queue.poll()  # raises what went wrong
        else:
            self.layer_step.drain()
        sessions.add(session)
        running = {n for each in sessions for n in each.sequences}
        self.layer_step.finish_sequences(running)
        return session

    def begin_prompts(self, session: Session, prompts) -> None:
        self._turn.step += 1
        if self.shadow is not None:
            self.shadow.note_prompts(session, prompts)

    def _begin_tokens(self, session: Session, tokens_B, active_B) -> None:
        self._turn.step += 1
        if self.shadow is not None:
            self._foreseen = self.shadow.step(session, tokens_B, active_B)

    def _run_layers(self, session, x, chunk, on_routing):
        state = self._calls.attend(session, 0, x, chunk)
        if self._turn.reader is not None:
            # Nothing above depends on the last step's experts where the caller knows
            # its tokens beforehand, and slots that a program reads must not change.
            jax.block_until_ready(self._turn.reader)
        if self._foreseen is not None:
            self._look_ahead()
        pairs = self.programs.is_pairs(chunk.valid_BS.size)
        for layer in range(self.config.num_layers):
            if self._is_moe[layer]:
                given = session, layer, state, chunk, pairs, on_routing
                state = self._moe_layer(*given)
            elif layer + 1 < self.config.num_layers:
                state = self._calls.attend(session, layer + 1, state, chunk)
        self._turn.reader = state
        self._reader.end_tokens(chunk.valid_BS.shape[1])
        return state

    def _look_ahead(self) -> None:
        """Asks for what the shadow expects of this token, layer by layer as it runs."""
        choices, self._foreseen = self._foreseen, None
        E = self.config.moe.num_experts
        wanted_LE = np.full((len(choices), E), NOT_WANTED, np.float32)
        for layer, ids_BK in enumerate(choices):
            if ids_BK is not None:
                wanted_LE[layer] = rank_scores(np.asarray(ids_BK), E)
                self.layer_step.look_ahead(wanted_LE, self._turn.step)

    def _moe_layer(self, session, layer, routed: Routed, chunk, pairs, on_routing):
        """Plans and dispatches a layer's experts and the next layer's attention."""
        layer_step, visit = self.layer_step, None
        if not self._slots.safe_in_thread:
            self.queue.poll()  # what has arrived goes into its slots
        where = layer, self._turn.step, session.sequences
        reading = self._reader.read(*where, routed, chunk.valid_BS.shape)
        if on_routing is not None:
            on_routing(layer, reading.own)
        tokens, slot_TK = len(reading.ids_TK), None
        other_TD = self._help.zeros.get(tokens)
        pairs = pairs and self._must_fit(layer, reading.ids_TK)
        helped = self._help.is_idle or self._help.may_pass(tokens)
        if pairs and reading.is_decode and helped:
            slot_TK = self._residency.ready_slots(layer, reading.ids_TK)
        if slot_TK is None or self._plans_first:
            visit = layer_step.begin(reading)
        # Else there is nothing to wait for: the device first, bookkeeping meanwhile.
        if slot_TK is None and pairs and layer_step.fits(visit):
            slot_TK, other_TD = self._bring(session, routed, reading, visit, chunk)
        if slot_TK is not None:
            if self._plans_first:
                layer_step.think_ahead(visit)
            given = routed, slot_TK, reading, chunk, other_TD
            self._turn.reader = state = self._calls.advance(session, *given)
        else:
            arrays = self._exchange.in_arrays(routed, reading)
            state = self._waves.run(*arrays, visit)
            if layer + 1 < self.config.num_layers:
                state = self._calls.attend(session, layer + 1, state, chunk)
        visit = visit or layer_step.begin(reading)
        layer_step.finish(visit)
        self._reader.note(reading, visit)
        return state

    def _bring(self, session, routed, reading: Reading, visit: LayerVisit, chunk):
        """(slots of the chosen experts, what backends add: float32 [T, D] or None)."""
        if self._help.is_idle:
            self.layer_step.bring(visit)
            return self._residency.slots(reading.layer, reading.ids_TK), None

        def peek(slot_TK):
            return self._calls.peek(session, routed, slot_TK, reading, chunk)

        hidden_TD = self._exchange.hidden_of(routed, reading)
        return self._help.bring(reading, visit, hidden_TD, peek)
