"""A predictor: experts that most often followed those of the layer before."""

import dataclasses

import numpy as np

import moe_edge as me
from moe_edge.predict.base import NOT_WANTED, best_first, no_prediction


@dataclasses.dataclass(frozen=True)
class Followers(me.Predictor):
    """Counts which experts of a layer follow which ones of the layer before.

    Attributes:
      width: experts that are named for the next layer.
    """

    width: int = 2

    name = "my_followers"
    SOURCE = "an example"
    needs = frozenset({"ids"})
    look_ahead = 1  # a longer horizon is refused

    def __post_init__(self):
        if self.width < 1:
            raise me.ConfigError(f"width must be at least 1, got {self.width}")

    def init(self, spec):
        L, E = spec.num_layers, spec.num_experts
        counts_LEE = np.zeros((L, E, E), np.float32)
        return {"counts_LEE": counts_LEE, "layer": -1, "chosen_E": np.zeros(E)}

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        """States are never changed: sequences may share one."""
        counts_LEE, E = state["counts_LEE"], len(state["chosen_E"])
        chosen_E = np.zeros(E + 1)
        chosen_E[np.asarray(ids_TK)] = 1  # id E is padding
        chosen_E = chosen_E[:E]
        if state["layer"] == layer - 1:
            counts_LEE = counts_LEE.copy()
            counts_LEE[layer] += np.outer(state["chosen_E"], chosen_E)
        return {"counts_LEE": counts_LEE, "layer": layer, "chosen_E": chosen_E}

    def predict(self, state, layer, horizon):
        if layer + 1 >= len(state["counts_LEE"]):
            return no_prediction(horizon)  # the next token's first layer
        seen_E = state["chosen_E"] @ state["counts_LEE"][layer + 1]
        wanted_NE = np.full((horizon, len(seen_E)), NOT_WANTED)
        wanted_NE[0] = np.where(seen_E > 0, seen_E, NOT_WANTED)
        return best_first(wanted_NE, self.width)

    def finish_sequence(self, state, fresh):
        """What was learnt is kept for the sequences to come."""
        return {**fresh, "counts_LEE": state["counts_LEE"]}
