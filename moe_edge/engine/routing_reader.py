"""The host's reading of a layer: what its router chose, and what is then computed.

This is the one place where decoding waits for the device. It reads no more than the
route policy, the cache, the predictor and the trace need.
"""

from typing import NamedTuple

import jax
import numpy as np

from moe_edge.engine.layer_programs import Routed
from moe_edge.engine.offload_options import AVAILABLE
from moe_edge.model.config import MoeConfig
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.policy import check_needs
from moe_edge.route.base import RoutePolicy, gate_scores
from moe_edge.workload.traces import DECODE, PREFILL, TraceRecorder


class Reading(NamedTuple):
    """What a layer computes.

    Attributes:
      ids_TK: int32, on the host; E is no expert.
      weights_TK: float32, on the device, or on the host where a route changed them.
      read: further arrays that were read: weights_TK, scores_TE, wanted_NE.
    """

    ids_TK: np.ndarray
    weights_TK: jax.Array | np.ndarray
    read: dict[str, np.ndarray]


class Choice(NamedTuple):
    """A reading, looked up.

    Attributes:
      ids_TK, weights_TK, read: of `Reading`.
      hits, misses: distinct experts that were, or were not, in slots.
      late: hits that were still on their way.
    """

    ids_TK: np.ndarray
    weights_TK: jax.Array | np.ndarray
    read: dict[str, np.ndarray]
    hits: np.ndarray
    misses: np.ndarray
    late: np.ndarray


class RoutingReader:
    """Reads routings, applies the route policy, looks the experts up.

    Args:
      moe: the model's rule.
      manager: of the cache and the predictor.
      route: may change what decoding computes.
      trace: collects lookups, or None.
      trace_scores: with the scores of all experts.
      needs_weights: the host computes with the weights.
    Raises:
      ConfigError: an eviction policy that needs to know the future.
    """

    def __init__(
        self,
        moe: MoeConfig,
        manager: OffloadManager,
        route: RoutePolicy,
        trace: TraceRecorder | None,
        *,
        trace_scores: bool = True,
        needs_weights: bool = False,
    ):
        check_needs(manager.cache.policy, AVAILABLE | {"profile"})
        self._moe, self._manager, self._route, self._trace = moe, manager, route, trace
        self.read_s = 0.0  # when the last routing was read, if events are recorded
        self._traces_scores = trace is not None and trace_scores
        self._keeps_scores = self._traces_scores or route.needs_resident
        self._keeps_scores |= "scores" in manager.cache.policy.needs
        self._keeps_weights = trace is not None or route.needs_resident
        self._keeps_weights |= needs_weights

    def read(self, layer: int, routed: Routed, shape_BS) -> Reading:
        """Waits for a layer's routing and applies the route policy."""
        manager, routing = self._manager, routed.routing
        is_decode = shape_BS[1] == 1
        ids_TK, weights_TK = np.asarray(routing.ids_TK), routing.weights_TK
        read = {}
        if self._keeps_weights:
            read["weights_TK"] = np.asarray(weights_TK)
        if self._keeps_scores:
            # Shares: what policies compare, and so what a trace keeps.
            raw_TE = np.asarray(routing.scores_TE)
            read["scores_TE"] = gate_scores(raw_TE, self._moe)
        if routed.wanted_NE is not None:
            read["wanted_NE"] = np.asarray(routed.wanted_NE)
        if manager.recorder.enabled:
            self.read_s = manager.recorder.clock.now()
        if self._route.needs_resident and is_decode:
            resident_E = manager.cache.resident(layer)
            ids_TK, weights_TK = self._route.route(
                layer, raw_TE, resident_E, self._moe, ids_TK, read["weights_TK"]
            )
            read["weights_TK"] = weights_TK
        return Reading(ids_TK, weights_TK, read)

    def look_up(self, layer: int, reading: Reading, shape_BS, step: int) -> Choice:
        """Looks the chosen experts up and tells the predictor."""
        manager, ids_TK = self._manager, reading.ids_TK
        is_decode = shape_BS[1] == 1
        scores_TE = reading.read.get("scores_TE")
        hits, misses = manager.look_up(layer, ids_TK, scores_TE, step, is_decode)
        if is_decode or manager.predictor_run.predictor.whole_prompt:
            manager.predictor_run.observe(layer, ids_TK, scores_TE)
        else:
            last_B = last_tokens(ids_TK, shape_BS, self._moe.num_experts)
            manager.predictor_run.observe(layer, ids_TK[last_B], None)
        if "wanted_NE" in reading.read:
            manager.predictor_run.store(layer, reading.read["wanted_NE"])
        return Choice(*reading, hits, misses, manager.late)

    def record(
        self,
        layer: int,
        choice: Choice,
        shape_BS,
        first_step: int,
        moved_bytes: int,
        waited_s: float,
    ) -> None:
        """Adds a lookup to the trace; `first_step` is that of the chunk's start."""
        if self._trace is None:
            return
        B, S = shape_BS
        token_T = np.arange(B * S)
        self._trace.add(
            DECODE if S == 1 else PREFILL,
            first_step + token_T % S,
            layer,
            choice.ids_TK,
            choice.read["weights_TK"],
            np.isin(choice.ids_TK, np.setdiff1d(choice.hits, choice.late)),
            moved_bytes,
            waited_s,
            choice.read["scores_TE"] if self._traces_scores else None,
            token_T // S,
        )


def last_tokens(ids_TK: np.ndarray, shape_BS, num_experts: int) -> np.ndarray:
    """Index of the last real token of every row that has one; padding is id E."""
    B, S = shape_BS
    real_BS = ids_TK[:, 0].reshape(B, S) < num_experts
    last_B = S - 1 - np.argmax(real_BS[:, ::-1], axis=1)
    return (np.arange(B) * S + last_B)[real_BS.any(axis=1)]
