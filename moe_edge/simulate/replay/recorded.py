"""What an engine chose and predicted in a run, and predictors that repeat it.

Which experts a layer chooses, and what a predictor names for the next ones, does not
depend on slots, eviction or link: a recorded run can be replayed with any of them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.model.config import MoeConfig
from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.base import Predictor, no_prediction
from moe_edge.route.base import Route
from moe_edge.simulate.replay.lookups import RoutedLayer, lookups
from moe_edge.simulate.replay.timed import Reroute
from moe_edge.workload.traces import DECODE, Trace, TraceRecorder

Predicted = Sequence[np.ndarray | None]  # ids_NM after each lookup; None: nothing


class RunLog(PredictionLog):
    """Also keeps every decode lookup: [layer, ids_TK, ids_NM predicted after it].

    Args:
      rows: of a decode step; lookups of more tokens are a prompt's and not kept. None:
        all are.
    """

    def __init__(self, *shape: int, rows: int | None = None):
        super().__init__(*shape)
        self.lookups: list[list] = []
        self._rows, self._keeps = rows, False

    def lookup(self, layer, routing):
        """Takes in a layer's routing, as an engine's `on_routing`."""
        self._keeps = self._rows is None or len(routing.ids_TK) == self._rows
        if self._keeps:
            self.lookups.append([layer, np.array(routing.ids_TK), None])

    def expect(self, layer, ids_NM):
        super().expect(layer, ids_NM)
        if self._keeps:
            self.lookups[-1][2] = np.array(ids_NM)

    @property
    def predicted(self) -> list[np.ndarray | None]:
        """What was predicted after each lookup."""
        return [ids_NM for *_, ids_NM in self.lookups]

    def trace(self, num_experts: int) -> Trace:
        """The decode lookups alone, as a trace."""
        first, ids_TK, _ = self.lookups[0]
        recorder, step = TraceRecorder(num_experts, ids_TK.shape[1]), -1
        for layer, ids_TK, _ in self.lookups:
            step += layer == first
            nothing_TK = np.zeros(ids_TK.shape)
            recorder.add(DECODE, step, layer, ids_TK, nothing_TK, nothing_TK)
        return recorder.trace()


@dataclasses.dataclass(frozen=True, eq=False)
class Replayed(Predictor):
    """Repeats what a run predicted, observation by observation."""

    predicted: Predicted
    name = "recorded"
    needs = frozenset({"ids"})

    def init(self, spec):
        return {"lookup": -1}

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        return {"lookup": state["lookup"] + 1}

    def finish_sequence(self, state, fresh):
        return state  # the run goes on with its next sequence

    def predict(self, state, layer, horizon):
        ids_NM = self.predicted[state["lookup"]]
        if ids_NM is None:
            return no_prediction(horizon)
        return ids_NM, np.zeros(ids_NM.shape, np.float32)


def rerouted(route: Route, moe: MoeConfig) -> Reroute:
    """What `replay_time` takes to choose as a lossy route.

    Args:
      moe: the router's rule; a trace keeps scores as shares.
    """
    shares = moe
    if moe.scoring == "softmax_topk":
        shares = dataclasses.replace(moe, scoring="softmax")

    def choose(routed: RoutedLayer, resident_E: np.ndarray) -> np.ndarray:
        seen = routed.scores_TE, resident_E, shares, routed.ids_TK, routed.weights_TK
        return np.asarray(route.route(routed.layer, *seen)[0], np.int32)

    return choose


def with_prompts(trace: Trace, predicted: Predicted) -> list[np.ndarray | None]:
    """What was predicted after each observation, where replay shows prompts, too.

    Args:
      predicted: after each decode lookup of the trace.
    """
    found: list[np.ndarray | None] = []
    prompt: set[int] = set()
    after = iter(predicted)
    for routed in lookups(trace):
        if routed.phase != DECODE:
            prompt.add(routed.layer)
            continue
        found += [None] * len(prompt)
        prompt.clear()
        found.append(next(after))
    return found
