"""The layered engine: experts live on the host, which plans every layer's transfers.

At each MoE layer the host reads the routing, lets a route policy change it, asks the
offload manager for what is missing and for what a predictor expects, and dispatches
the next program when the blocks are in their slots. Lossless unless the route policy
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
from moe_edge.engine.base import Engine, refuse_deterministic, refuse_rows
from moe_edge.engine.expert_state import ExpertState, Moved, of_manager
from moe_edge.engine.follower import Choices, LocalShadow
from moe_edge.engine.homes import AtHome
from moe_edge.engine.inline import is_inline
from moe_edge.engine.layer_exchange import Arrays, Words
from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.layer_waves import LayerWaves
from moe_edge.engine.routing_reader import Reading, RoutingReader
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.layer_visit import LayerVisit
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.slots import is_lost
from moe_edge.predict.base import NOT_WANTED, rank_scores
from moe_edge.route.base import Route, TopK
from moe_edge.workload.traces import TraceRecorder


@dataclasses.dataclass
class _Turn:
    """Where the engines of one manager stand."""

    step: int = -1  # counts lookup rounds
    # Output of the last program that reads slots: an array after a step, in the middle
    # of one perhaps several.
    reader: Any = None
    sessions: weakref.WeakSet[Session] = dataclasses.field(
        default_factory=weakref.WeakSet  # those that somebody still holds
    )


class LayeredEngine(Engine):
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
        manager: OffloadManager,
        *,
        route: Route | None = None,
        backends: Sequence[Backend] = (),
        trace: TraceRecorder | None = None,
        trace_scores: bool = True,
        programs: LayerPrograms | None = None,
        shadow: LocalShadow | None = None,
        in_words: bool = False,
    ):
        config = weights.config
        self._slots = manager.queue.slots
        self._exchange = _exchange_of(manager, in_words)
        weights = self._exchange.weights(weights)
        programs = programs or LayerPrograms(config, self._slots.dtype)
        programs.check_records(self._slots.dtype)
        super().__init__(weights, programs)
        self._windows = self._exchange.windows(self._windows)
        self.manager, self.trace = manager, trace
        self.backends, self.route = tuple(backends), route or TopK()
        # Where programs run in this thread, transfers are requested before the
        # dispatch, so that they overlap it.
        self._plans_first = is_inline()
        given = programs, manager, self._exchange, self._plans_first
        self._waves = LayerWaves(*given)
        manager.predictor_run.moe_layers = config.moe_layers
        self._predictor = manager.predictor_run.predictor
        self._peeks = "partial_state" in self._predictor.needs
        # By number of tokens. Programs are compiled by whoever runs first, so backends
        # and looking ahead run once before anything may pass them by.
        self._zeros: dict[int, np.ndarray] = {}  # what backends add where all is here
        self._peeked: set[int] = set()
        self._is_moe = [i in config.moe_layers for i in range(config.num_layers)]
        needs = {"trace_scores": trace_scores, "needs_weights": bool(self.backends)}
        self._reader = RoutingReader(config.moe, manager, self.route, trace, **needs)
        # What is called for layers whose experts all stand in slots.
        self._steps = self._exchange.steps(programs, self._reader.reads)
        self._turn = _Turn()
        self._shadow = shadow
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
            self.manager,
            route=self.route,
            backends=self.backends,
            programs=LayerPrograms(weights.config, dtype, top),
            shadow=self._shadow and self._shadow.at_k(weights.config.moe.top_k),
            in_words=isinstance(self._exchange, Words),
        )
        sibling._turn = self._turn  # they take turns at the same slots
        return sibling

    def put(self, tree):
        return self._exchange.put(tree)

    def num_compiled(self) -> int:
        own = super().num_compiled()
        return own + (self._shadow.shadow.num_compiled() if self._shadow else 0)

    def close(self) -> None:
        self.manager.queue.close()

    def reset_records(self) -> None:
        self.manager.reset_counters()
        self.manager.recorder.clear()
        for backend in self.backends:
            backend.reset()
        self._reader.clear()

    def restart(self) -> None:
        self.manager.restart()
        self.reset_records()

    def recover(self) -> None:
        # Slots that a program still reads must not change.
        is_lost((self._turn.reader, self._waves.last))
        self._turn.reader = self._waves.last = self._foreseen = None
        self.manager.recover()

    def movement(self) -> dict:
        return self.manager.movement()

    def moved(self) -> Moved:
        counted, sent = self.manager.statistics, self.manager.queue.stats()
        sent_bytes = sent.demand.bytes, sent.prefetch.bytes, sent.wasted_bytes
        return Moved(*sent_bytes, counted.choices, counted.rerouted)

    def device_bytes(self) -> int:
        held = self.weights.num_bytes + self._slots.num_bytes
        return held + (self._shadow.shadow.weights.num_bytes if self._shadow else 0)

    def expert_state(self) -> ExpertState:
        return of_manager(self.manager)

    def report(self) -> dict:
        helped = sum(backend.computed for backend in self.backends)
        mode = {"mode": "layered", "route": self.route.name, "lossless": self.lossless}
        if not self.lossless:
            counted = self.manager.statistics
            mode |= {"choices": counted.choices, "rerouted": counted.rerouted}
        if self._shadow is not None:
            mode["shadow_bytes"] = self._shadow.shadow.weights.num_bytes
        return mode | {"host_computed": helped} | self.manager.report()

    def remarks(self) -> list[str]:
        run, waves = self.manager.predictor_run, self.manager.statistics.waves[True]
        if run.is_idle or not waves:
            return []
        return [
            f"{waves} decode layers ran in waves (more experts than slots, or a batch "
            f"of many rows), where predictor {self._predictor.name} is off; raise "
            "device_memory or lower batch_size to use it"
        ]

    def check_rows(self, deterministic: bool = False) -> None:
        policy = self.manager.cache.policy
        if policy.per_sequence:
            refuse_rows(f"eviction policy {policy.name}")
        if self._shadow is not None:
            refuse_rows(f"predictor {self._predictor.name}")
        if self.trace is not None:
            refuse_rows("a trace")
        if deterministic and not self.lossless:
            refuse_deterministic(f"route {self.route.name}")
        if deterministic and self.backends:
            refuse_deterministic("experts computed elsewhere (assist)")

    @contextlib.contextmanager
    def crowded(self):
        self._is_crowded = True
        try:
            yield
        finally:
            self._is_crowded = False

    def _must_fit(self, layer: int, ids_TK) -> bool:
        """Whether a layer runs at once if its experts fit; else in waves anyway."""
        fits = self.manager.cache.surely_fits
        return not self._is_crowded or fits(layer, ids_TK.size)

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
            self.manager.queue.poll()  # raises what went wrong
        else:
            self.manager.drain()
        sessions.add(session)
        self.manager.finish_sequences({n for each in sessions for n in each.sequences})
        return session

    def begin_prompts(self, session: Session, prompts) -> None:
        self._turn.step += 1
        if self._shadow is not None:
            self._shadow.note_prompts(session, prompts)

    def _begin_tokens(self, session: Session, tokens_B, active_B) -> None:
        self._turn.step += 1
        if self._shadow is not None:
            self._foreseen = self._shadow.step(session, tokens_B, active_B)

    def _run_layers(self, session, x, chunk, on_routing):
        state = self._attend(session, 0, x, chunk)
        if self._turn.reader is not None:
            # Nothing above depends on the last step's experts where the caller knows
            # its tokens beforehand, and slots that a program reads must not change.
            jax.block_until_ready(self._turn.reader)
        if self._foreseen is not None:
            self._look_ahead()
        for layer in range(self.config.num_layers):
            if self._is_moe[layer]:
                state = self._moe_layer(session, layer, state, chunk, on_routing)
            elif layer + 1 < self.config.num_layers:
                state = self._attend(session, layer + 1, state, chunk)
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
                self.manager.look_ahead(wanted_LE, self._turn.step)

    def _layer_arguments(self, session, layer: int, chunk) -> tuple:
        is_decode = chunk.valid_BS.shape[1] == 1
        gates = self._predictor.gates_after(layer) if is_decode else ()
        params, window = self.weights.layers[layer], self._windows[layer]
        return params, gates, chunk, window, session.caches[layer]

    def _attend(self, session, layer: int, x, chunk):
        arguments = self._layer_arguments(session, layer, chunk)
        kind = self.programs.kinds[layer]
        self._reader.note_dispatch()
        state, session.caches[layer] = self._steps.attend(kind, x, *arguments)
        return state

    def _moe_layer(self, session, layer, routed: Routed, chunk, on_routing):
        """Plans and dispatches a layer's experts and the next layer's attention."""
        manager, reader = self.manager, self._reader
        if not self._slots.safe_in_thread:
            manager.queue.poll()  # what has arrived goes into its slots
        where = layer, self._turn.step, session.sequences
        reading = reader.read(*where, routed, chunk.valid_BS.shape)
        if on_routing is not None:
            on_routing(layer, reading.own)
        pairs = self.programs.is_pairs(len(reading.ids_TK))
        pairs = pairs and self._must_fit(layer, reading.ids_TK)
        other_TD = self._zeros.get(len(reading.ids_TK))
        if pairs and reading.is_decode and self._may_pass(len(reading.ids_TK)):
            slot_TK = manager.residency.ready_slots(layer, reading.ids_TK)
            if slot_TK is not None:
                # Nothing to wait for: the device first, bookkeeping meanwhile.
                visit = None
                if self._plans_first:
                    visit = reader.look_up(reading)
                    visit.think_ahead()
                chosen = slot_TK, reading, chunk, other_TD
                state = self._dispatch(session, routed, *chosen)
                reader.finish(reading, visit or reader.look_up(reading))
                return state
        visit = reader.look_up(reading)
        if pairs and visit.fits:
            slot_TK, other_TD = self._bring(session, routed, reading, visit, chunk)
            if self._plans_first:
                visit.think_ahead()
            state = self._dispatch(session, routed, slot_TK, reading, chunk, other_TD)
        else:
            arrays = self._exchange.in_arrays(routed, reading)
            state = self._waves.run(*arrays, visit)
            if layer + 1 < self.config.num_layers:
                state = self._attend(session, layer + 1, state, chunk)
        reader.finish(reading, visit)
        return state

    def _may_pass(self, tokens: int) -> bool:
        """Whether a layer whose experts are all here needs nobody's help."""
        helped = not self.backends or tokens in self._zeros
        return helped and (not self._peeks or tokens in self._peeked)

    def _bring(self, session, routed, reading: Reading, visit: LayerVisit, chunk):
        """Brings a layer's experts, or lets backends compute absent ones.

        Returns:
          (slots of the chosen experts, what backends add: float32 [T, D] or None).
        """
        absent, elsewhere, parts = visit.misses, [], []
        hidden_TD = self._exchange.hidden_of(routed, reading)
        if reading.is_decode:
            for backend in self.backends:
                taken = backend.take(reading, absent)
                absent = [expert for expert in absent if expert not in taken]
                elsewhere += taken
                parts.append(backend.start(hidden_TD, reading, taken))
        visit.computed_elsewhere(elsewhere)
        outputs = []

        def meanwhile():
            # Where nothing had to be brought the next layer's own router sees the
            # state as soon.
            is_new = len(reading.ids_TK) not in self._peeked
            if self._peeks and reading.is_decode and (visit.travels or is_new):
                self._peek(session, routed, reading, visit, chunk)
            outputs.extend(finish() for finish in parts)

        fetched = visit.bring(absent, meanwhile)
        for backend in self.backends:
            backend.note(fetched)
        slot_TK = self.manager.residency.slots(reading.layer, reading.ids_TK)
        if elsewhere:
            # One may be on its way for the next token already: not for this one.
            slot_TK[np.isin(reading.ids_TK, elsewhere)] = self._slots.num_slots
        if not outputs:
            return slot_TK, None
        # NumPy's always, the zeros too: an array of the device would compile a program
        # of its own. On a CPU putting one there takes 60 us, a call with it 2.
        other_TD = sum(outputs[1:], outputs[0])
        if not elsewhere:
            other_TD = self._zeros.setdefault(len(other_TD), other_TD)
        return slot_TK, other_TD

    def _dispatch(self, session, routed, slot_TK, reading, chunk, other_TD=None):
        """A layer's experts, which stand in slots, and the next layer's attention."""
        following = reading.layer + 1
        given = reading.layer, routed, slot_TK, reading, self._slots.array, other_TD
        chosen = self._exchange.chosen(*given)
        if following == self.config.num_layers:
            state = self._steps.experts(*chosen)
        else:
            arguments = self._layer_arguments(session, following, chunk)
            self._reader.note_dispatch()
            state, session.caches[following] = self._steps.advance(
                self.programs.kinds[following], chosen, *arguments
            )
        self._turn.reader = state
        return state

    def _peek(self, session, routed, reading: Reading, visit, chunk) -> None:
        """SMoE's prefetch: the next layer's choice on the state that is ready."""
        manager, layer = self.manager, reading.layer
        if layer + 1 == self.config.num_layers or not self._is_moe[layer + 1]:
            return
        slot_TK = manager.residency.slots(layer, reading.ids_TK, arrived_only=True)
        given = routed, slot_TK, reading, self._slots.array
        chosen = self._exchange.chosen(layer + self.config.num_layers, *given)
        arguments = self._layer_arguments(session, layer + 1, chunk)
        self._peeked.add(len(reading.ids_TK))
        given = self.programs.kinds[layer + 1], chosen, *arguments
        wanted_E = self._steps.peek(*given, top_a=self._predictor.top_a)
        manager.predictor_run.store(layer, np.asarray(wanted_E)[None])
        visit.prefetch()


def _exchange_of(manager: OffloadManager, in_words: bool) -> Arrays:
    slots = manager.queue.slots
    if isinstance(slots, HomeSlots):
        return AtHome(manager.cache.homes, slots)
    return Words(jax.local_devices()[0]) if in_words else Arrays()
