"""The resident engine: all weights on the device, steps as a few jitted programs.

A step is a fixed sequence of programs: embed, layers, head. One program serves every
layer of the same kind, so a deep model compiles quickly. It is the oracle that every
offloaded mode is compared with.
"""

import functools

from moe_edge.engine.base import Engine
from moe_edge.engine.programs import Programs, TopPrograms, jit_step
from moe_edge.engine.weights import Weights
from moe_edge.model.config import ModelConfig
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout


class ResidentPrograms(Programs):
    """`layer`: a layer whose experts are an argument, None in a dense one."""

    def __init__(self, config: ModelConfig, top: TopPrograms | None = None):
        super().__init__(config, top)
        self.run_experts = functools.partial(
            run_experts,
            layout=RecordLayout.of(config),
            activation=config.moe.activation,
            swiglu_limit=config.moe.swiglu_limit,
        )
        self.layer = jit_step(self._layer_step, donate_argnames="cache")

    def _layer_step(self, layer, experts, x_BSD, chunk, window, cache):
        block = self.bind(experts is not None, layer)
        return block(x_BSD, chunk, window, experts, self.run_experts, cache)


class ResidentEngine(Engine):
    """Runs a model whose weights all fit the device.

    Args:
      weights: the model.
      programs: of another engine, instead of new ones.
    """

    programs: ResidentPrograms

    def __init__(self, weights: Weights, *, programs: ResidentPrograms | None = None):
        super().__init__(weights, programs or ResidentPrograms(weights.config))

    def _sibling(self, weights):
        programs = ResidentPrograms(weights.config, self.programs.top)
        return ResidentEngine(weights, programs=programs)

    def _run_layers(self, session, x, chunk, on_routing):
        for layer, experts in enumerate(self.weights.experts):
            x = self._run_layer(session, layer, experts, x, chunk, on_routing)
        return x

    def _run_layer(self, session, layer: int, experts, x, chunk, on_routing):
        x, session.caches[layer], routing = self.programs.layer(
            self.weights.layers[layer],
            experts,
            x,
            chunk,
            self._windows[layer],
            session.caches[layer],
        )
        if on_routing is not None and routing is not None:
            on_routing(layer, routing)
        return x
