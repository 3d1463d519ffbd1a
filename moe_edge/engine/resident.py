"""The resident engine: all weights on the device, steps as a few jitted programs.

A step is a fixed sequence of programs: embed, groups of layers, head. One program
serves every group of the same kinds of layers, so a deep model compiles quickly. It
is the oracle that every offloaded mode is compared with.
"""

import functools

import jax.numpy as jnp

from moe_edge.engine.base import Engine
from moe_edge.engine.programs import Programs, TopPrograms, jit_step
from moe_edge.engine.weights import Weights, bind_block, block_graph
from moe_edge.model.config import ModelConfig
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.model.transformer import layer_window


class ResidentPrograms(Programs):
    """`layers`: a group of layers whose experts are arguments."""

    def __init__(
        self,
        config: ModelConfig,
        expert_method: str | None = None,
        top: TopPrograms | None = None,
    ):
        super().__init__(config, top)
        self._method = expert_method
        self.run_experts = functools.partial(
            run_experts,
            layout=RecordLayout.of(config),
            activation=config.moe.activation,
            swiglu_limit=config.moe.swiglu_limit,
            method=expert_method,
        )
        self._graphs = {kind: block_graph(config, kind) for kind in (False, True)}
        self.layers = jit_step(
            self._layers_step, static_argnames="kinds", donate_argnames="caches"
        )

    def at(self, config: ModelConfig) -> "ResidentPrograms":
        """The same programs for another k."""
        return ResidentPrograms(config, self._method, self.top)

    def all(self) -> list:
        return [*super().all(), self.layers]

    def _layers_step(self, kinds, layers, experts, x_BSD, chunk, windows, caches):
        new_caches, routings = [], []
        for i, is_moe in enumerate(kinds):
            block = bind_block(self._graphs[is_moe], layers[i])
            x_BSD, cache, routing = block(
                x_BSD, chunk, windows[i], experts[i], self.run_experts, caches[i]
            )
            new_caches.append(cache)
            routings.append(routing)
        return x_BSD, tuple(new_caches), tuple(routings)


class ResidentEngine(Engine):
    """Runs a model whose weights all fit the device.

    Args:
      weights: the model.
      layers_per_program: how many layers one jitted program holds.
      expert_method: forces one of `experts.METHODS` (None: chosen by size).
      programs: of another engine, instead of new ones by that method.
    """

    programs: ResidentPrograms

    def __init__(
        self,
        weights: Weights,
        *,
        layers_per_program: int = 1,
        expert_method: str | None = None,
        programs: ResidentPrograms | None = None,
    ):
        config, size = weights.config, layers_per_program
        groups = [
            tuple(range(first, min(first + size, config.num_layers)))
            for first in range(0, config.num_layers, size)
        ]
        programs = programs or ResidentPrograms(config, expert_method)
        super().__init__(weights, groups, programs)
        self._layers_per_program = layers_per_program
        self._windows = [
            jnp.asarray([layer_window(config, layer) for layer in group], jnp.int32)
            for group in groups
        ]

    def _sibling(self, weights):
        return ResidentEngine(
            weights,
            layers_per_program=self._layers_per_program,
            programs=self.programs.at(weights.config),
        )

    def _run_layers(self, session, x, chunk, on_routing):
        weights = self.weights
        for i, group in enumerate(self._groups):
            x, session.caches[i], routings = self.programs.layers(
                tuple(weights.experts[layer] is not None for layer in group),
                tuple(weights.layers[layer] for layer in group),
                tuple(weights.experts[layer] for layer in group),
                x,
                chunk,
                self._windows[i],
                session.caches[i],
            )
            if on_routing is not None:
                for layer, routing in zip(group, routings, strict=True):
                    if routing is not None:
                        on_routing(layer, routing)
        return x
