"""The host's reading of a layer: what its router chose, and what is then computed.

This is the one place where decoding waits for the device. It reads no more than the
route policy, the cache, the predictor, the backends and the trace need. What the
reading led to goes into trace and timeline here, once the layer is dispatched.
"""

from typing import NamedTuple

import jax
import numpy as np

from moe_edge.engine.layer_programs import Routed
from moe_edge.engine.layer_words import Reads, split
from moe_edge.engine.offload_options import AVAILABLE
from moe_edge.model.config import MoeConfig
from moe_edge.model.router import Routing
from moe_edge.offload.evict_base import check_needs
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.layer_visit import LayerVisit
from moe_edge.route.base import Route, TopK, gate_scores, host_choice
from moe_edge.workload.traces import DECODE, PREFILL, TraceRecorder


class Reading(NamedTuple):
    """What a layer computes, and where it stands."""

    layer: int
    step: int  # counts lookup rounds
    sequences: list[int]  # the numbers of the rows' sequences
    shape_BS: tuple[int, int]  # of the tokens
    ids_TK: np.ndarray  # int32, on the host; E is no expert
    weights_TK: jax.Array | np.ndarray  # on the host where a route changed them
    # On the host, None where nobody reads them: the weights, the scores of all experts
    # (shares), what gate predictors asked for, and the states that experts take.
    host_weights_TK: np.ndarray | None
    scores_TE: np.ndarray | None
    wanted_NE: np.ndarray | None
    hidden_TD: np.ndarray | None = None
    own: Routing | None = None  # the router's, as it was read

    @property
    def is_decode(self) -> bool:
        return self.shape_BS[1] == 1


class RoutingReader:
    """Reads routings and applies the route policy.

    Args:
      trace: collects lookups, with the scores of all experts if `trace_scores`.
      needs_weights: a backend computes with the weights.
    Raises:
      ConfigError: an eviction policy that needs to know the future.
    """

    def __init__(
        self,
        moe: MoeConfig,
        layer_step: LayerStep,
        route: Route,
        trace: TraceRecorder | None,
        *,
        trace_scores: bool = True,
        needs_weights: bool = False,
    ):
        cache, predictions = layer_step.cache, layer_step.predictor_run
        check_needs(cache.policy, AVAILABLE | {"profile"})
        self._moe, self._route, self._trace = moe, route, trace
        self._queue, self._residency = layer_step.queue, layer_step.residency
        self._statistics, self._recorder = layer_step.statistics, layer_step.recorder
        self._traces_scores = trace is not None and trace_scores
        self._asks_route = type(route) is not TopK
        self._keeps_scores = self._traces_scores or self._asks_route
        self._keeps_scores |= "scores" in cache.policy.needs
        self._keeps_scores |= predictions.reads("scores")
        self._keeps_hidden = predictions.reads("hidden")
        # In words hidden states cost backends nothing more to read.
        hidden = self._keeps_hidden or needs_weights
        self._keeps_weights = trace is not None or self._asks_route
        self._keeps_weights |= needs_weights
        self.reads = Reads(self._keeps_weights, bool(self._keeps_scores), hidden)
        self._dispatched_s = 0.0
        self._first_step = 0  # of the trace, in which the running tokens begin

    def read(
        self, layer: int, step: int, sequences, routed: Routed, shape_BS
    ) -> Reading:
        """Waits for a layer's routing and applies the route policy."""
        if routed.words is not None:
            own, hidden_TD, wanted_NE = self._from_words(routed)
        else:
            own, hidden_TD, wanted_NE = routed.routing, None, None
        ids_TK, weights_TK = np.asarray(own.ids_TK), own.weights_TK
        read_s = self._now()
        self._queue.poll()  # what the link has done meanwhile
        host_TK = scores_TE = None
        if self._keeps_weights:
            host_TK = np.asarray(weights_TK)
        if self._keeps_scores:
            # Shares: what policies compare, and so what a trace keeps.
            raw_TE = np.asarray(own.scores_TE)
            scores_TE = gate_scores(raw_TE, self._moe)
        # Of a prompt's states all are read, though many a predictor sees only the last.
        if self._keeps_hidden and hidden_TD is None:
            hidden_TD = np.asarray(routed.hidden_TD)
        if routed.wanted_NE is not None:
            wanted_NE = np.asarray(routed.wanted_NE)
        if self._recorder.enabled:
            self._note_compute(layer, step, read_s)
        if self._asks_route and shape_BS[1] == 1:
            resident_E, own_TK = self._residency.arrived(layer), ids_TK
            seen = raw_TE, resident_E, self._moe, own_TK, host_TK
            # Changed or not, both are the host's: one kind of argument of programs.
            ids_TK, weights_TK = host_choice(self._route, layer, *seen)
            changed = int(np.count_nonzero(ids_TK != own_TK))
            real = int(np.count_nonzero(own_TK < self._moe.num_experts))
            self._statistics.count_route(real, changed)
            host_TK = weights_TK
        where = layer, step, sequences, shape_BS
        seen = host_TK, scores_TE, wanted_NE, hidden_TD, own
        return Reading(*where, ids_TK, weights_TK, *seen)

    def _from_words(self, routed: Routed) -> tuple[Routing, np.ndarray, np.ndarray]:
        """What a layer's words say: routing, hidden_TD and wanted_NE, each or None."""
        (T, D), K = routed.hidden_TD.shape, self._moe.top_k
        E, floats = self._moe.num_experts, np.float32
        words = np.asarray(routed.words)
        shapes = [((T, K), np.int32)]
        shapes += [((T, K), floats)] if self.reads.weights else []
        shapes += [((T, E), floats)] if self.reads.scores else []
        shapes += [((T, D), floats)] if self.reads.hidden else []
        ids_TK, *more, wanted_NE = split(words, [*shapes, ((-1, E), floats)])
        weights_TK = more.pop(0) if self.reads.weights else routed.routing.weights_TK
        scores_TE = more.pop(0) if self.reads.scores else None
        hidden_TD = more.pop() if self.reads.hidden else None
        own = Routing(ids_TK, weights_TK, scores_TE)
        return own, hidden_TD, wanted_NE if len(wanted_NE) else None

    def note(self, reading: Reading, visit: LayerVisit) -> None:
        """What the reading led to goes into the trace."""
        if self._trace is None:
            return
        B, S = reading.shape_BS
        token_T = np.arange(B * S)
        self._trace.add(
            PREFILL if S > 1 else DECODE,
            self._first_step + token_T % S,
            reading.layer,
            reading.ids_TK,
            reading.host_weights_TK,
            np.isin(reading.ids_TK, visit.hits),
            visit.moved * self._queue.block_bytes,
            visit.waited_s,
            reading.scores_TE if self._traces_scores else None,
            token_T // S,
        )

    def end_tokens(self, length: int) -> None:
        """All layers of so many positions have run."""
        self._first_step += length

    def clear(self) -> None:
        """Forgets the trace so far."""
        if self._trace is not None:
            self._trace.clear()
            self._first_step = 0

    # The timeline.

    def note_dispatch(self) -> None:
        """The device has work from here on."""
        self._dispatched_s = self._now()

    def _now(self) -> float:
        return self._recorder.clock.now() if self._recorder.enabled else 0.0

    def _note_compute(self, layer: int, step: int, read_s: float) -> None:
        """The time from a dispatch to its read-back: the experts of the layer before,
        then attention and router of this one."""
        recorder, started_s = self._recorder, self._dispatched_s
        where = {"layer": layer, "step": step}
        recorder.add("compute", started_s, read_s - started_s, **where)
        recorder.add("route", read_s, **where)
