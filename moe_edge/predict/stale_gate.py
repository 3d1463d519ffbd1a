"""Predictions by later layers' routers, run ahead of time on the device.

The residual stream changes little from layer to layer, so the router of layer l + 1
on the state of layer l already names most of its experts (Mixtral-offloading, arXiv
2312.17238); HOBBIT (arXiv 2411.01433) asks the next n routers.

The scores come from `device_scores`, inside programs of the engine.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from moe_edge.core.checks import check_count, check_known
from moe_edge.core.plug_in import register
from moe_edge.model.config import ModelConfig
from moe_edge.predict.base import (
    NOT_WANTED,
    Predictor,
    State,
    best_first,
    no_prediction,
)

Flat = Mapping[str, Any]  # device arrays by name


@dataclasses.dataclass(frozen=True, eq=False)
class DevicePredictor(Predictor):
    """Base of predictors whose scores are computed on the device."""

    observes: ClassVar[bool] = False

    def init(self, spec):
        """State: `layer` observed last, `wanted_NE` scores of the layers after it."""
        return {"layer": -1, "wanted_NE": np.zeros((0, spec.num_experts), np.float32)}

    def store(self, state: State, layer: int, wanted_NE) -> State:
        """Takes in scores that the engine's program computed.

        Args:
          layer: the layer on whose state they were computed.
          wanted_NE: a row for each of layers layer + 1, ..., layer + N.
        """
        return {"layer": layer, "wanted_NE": np.asarray(wanted_NE, np.float32)}

    def predict(self, state, layer, horizon):
        wanted_NE = state["wanted_NE"][:horizon]
        if state["layer"] != layer or not len(wanted_NE):
            return no_prediction(horizon)
        if horizon > len(wanted_NE):
            missing = ((0, horizon - len(wanted_NE)), (0, 0))
            wanted_NE = np.pad(wanted_NE, missing, constant_values=NOT_WANTED)
        return best_first(wanted_NE)


@dataclasses.dataclass(frozen=True, eq=False)
class LooksAhead(DevicePredictor):
    """Base of those that read a layer's state for the next `look_ahead` layers.

    Subclasses have the fields config and look_ahead (named here, they would come before
    all others).
    """

    def targets(self, layer: int) -> tuple[int, ...]:
        """MoE layers that are predicted after `layer`: none of the next token."""
        own: Any = self  # of a subclass, with its fields
        last = layer + own.look_ahead
        return tuple(i for i in own.config.moe_layers if layer < i <= last)

    def store(self, state, layer, wanted_NE):
        """As the base's, with a row for each of `targets(layer)`."""
        own: Any = self
        shape = own.look_ahead, own.config.moe.num_experts
        rows_NE = np.full(shape, NOT_WANTED, np.float32)
        rows_NE[np.array(self.targets(layer), int) - layer - 1] = np.asarray(wanted_NE)
        return super().store(state, layer, rows_NE)


def is_by_programs(kind: type[Predictor]) -> bool:
    """Whether a program's scores are all that a predictor's choice needs.

    One that stores them, or sorts them, in a way of its own does that on the host.
    """
    if issubclass(kind, LooksAhead):
        base: type[DevicePredictor] = LooksAhead
    elif issubclass(kind, DevicePredictor) and kind.needs == {"partial_state"}:
        base = DevicePredictor
    else:
        return False
    return kind.store is base.store and kind.predict is base.predict


@register
@dataclasses.dataclass(frozen=True, eq=False)
class GatePredictor(LooksAhead):
    """Routers of the next layers on the current state."""

    config: ModelConfig
    layers: Sequence[
        Flat
    ]  # the dense weights by name (`engine.weights.Weights.layers`)
    look_ahead: int = 1  # n, how many layers ahead
    # Whose norm weights the state carries when a later router reads it: the later
    # layer's, or those it was normed with ("own", as Mixtral-offloading applies it).
    norm: str = "target"
    name: ClassVar[str] = "n_layer_gate"
    SOURCE: ClassVar[str] = "HOBBIT, arXiv 2411.01433"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    from_context: ClassVar[dict[str, str]] = {
        "config": "model",
        "layers": "dense_layers",
    }

    def __post_init__(self):
        check_count("look_ahead", self.look_ahead)
        check_known("norm of a stale gate", self.norm, ("target", "own"))

    @functools.cached_property
    def _gates(self) -> dict[int, tuple[Flat, ...]]:
        import jax

        gates: dict[int, tuple[Flat, ...]] = {i: () for i in self.config.moe_layers}
        for layer in self.config.moe_layers:
            for target in self.targets(layer):
                flat = self.layers[target]
                gate = {k: v for k, v in flat.items() if k.startswith("router.")}
                change = self._change_of_norm(self.layers[layer], flat)
                gates[layer] += (gate | jax.tree.map(jax.numpy.array, change),)
        return gates

    def _change_of_norm(self, own: Flat, target: Flat) -> dict[str, np.ndarray]:
        """`scale` and, of LayerNorm, `shift`: exchange one norm's weights for the
        other's. Where a weight is zero the state is lost, and nothing can be restored.
        """
        scale_D = np.ones(self.config.d_model, np.float32)
        has_own = self.config.moe.own_norms  # then the norm before it has no weights
        if self.norm == "own" or has_own or not self.config.norm_before:
            return {"scale": scale_D}
        own_D, target_D = (np.asarray(x["mlp_norm"], np.float32) for x in (own, target))
        safe_D = np.where(own_D == 0, 1.0, own_D)
        scale_D = np.where(own_D == 0, 0.0, target_D / safe_D).astype(np.float32)
        if self.config.norm == "rms":
            return {"scale": scale_D}
        biases = (np.asarray(x["mlp_norm_bias"], np.float32) for x in (own, target))
        own_bias_D, target_bias_D = biases
        return {"scale": scale_D, "shift": target_bias_D - own_bias_D * scale_D}

    def gates_after(self, layer: int) -> tuple[Flat, ...]:
        """Arguments of `scores_ahead` after `layer`: one gate for each target."""
        return self._gates.get(layer, ())


@register
@dataclasses.dataclass(frozen=True, eq=False)
class StaleGate(GatePredictor):
    """The router of the next layer only."""

    look_ahead: int = dataclasses.field(default=1, init=False)
    name: ClassVar[str] = "stale_gate"
    SOURCE: ClassVar[str] = "Mixtral-offloading, arXiv 2312.17238"
