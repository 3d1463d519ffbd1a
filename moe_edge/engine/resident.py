"""The resident engine: all weights on the device, steps as a few jitted programs.

A step is a fixed sequence of programs: embed, groups of layers, head. One program
serves every group of the same kinds of layers, so a deep model compiles quickly; a
decode step of a model of one group is one program. It is the oracle that every
offloaded mode is compared with.
"""

import functools

import jax

from moe_edge.engine.base import Engine
from moe_edge.engine.programs import Programs, TopPrograms, jit_step
from moe_edge.engine.weights import Weights
from moe_edge.model.branches import seam
from moe_edge.model.config import ModelConfig
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout


class ResidentPrograms(Programs):
    """Programs of whole layers, whose experts are arguments, None in dense ones.

    `layers`: a group of them. `decode`: a decode step of a model of one group.
    """

    def __init__(self, config: ModelConfig, top: TopPrograms | None = None, **options):
        super().__init__(config, top, **options)
        self.run_experts = functools.partial(
            run_experts,
            layout=RecordLayout.of(config),
            activation=config.moe.activation,
            swiglu_limit=config.moe.swiglu_limit,
        )
        self.layers = jit_step(
            self._layers_step, static_argnums=0, donate_argnames="caches"
        )
        self.decode = jit_step(self._decode_step, donate_argnames="caches")

    def _layers_step(self, kinds, layers, experts, windows, x_BSD, chunk, caches):
        new_caches, routings = [], []
        for i, experts_ER in enumerate(experts):
            block = self.bind(kinds[i], layers[i])
            x_BSD, cache, routing = block(
                x_BSD, chunk, windows[i], experts_ER, self.run_experts, caches[i]
            )
            new_caches.append(cache)
            routings.append(routing)
        return x_BSD, new_caches, routings

    def _decode_step(self, top, layers, experts, windows, tokens, k_B, caches):
        # Seams where steps of several programs are cut.
        embed_VD, programs = top["embed"], self.top
        x, chunk, positions_B = programs.next_embed_step(embed_VD, *tokens, k_B)
        x, chunk = seam((x, chunk))
        parts = layers, experts, windows, x, chunk, caches
        x, caches, routings = self._layers_step(self.kinds, *parts)
        return programs.head_step(top, seam(x)[:, 0]), positions_B, caches, routings


class ResidentEngine(Engine):
    """Runs a model whose weights all fit the device.

    Args:
      weights: the model.
      layers_per_program: how many layers one jitted program holds: with more of them
        less Python is between steps, see docs/measurements.md. None: 8, on a GPU 16,
        as many as were timed there.
      programs: of another engine, instead of new ones.
    """

    programs: ResidentPrograms
    may_run_ahead = True

    def __init__(
        self,
        weights: Weights,
        *,
        layers_per_program: int | None = None,
        programs: ResidentPrograms | None = None,
    ):
        super().__init__(weights, programs or ResidentPrograms(weights.config))
        on_gpu = jax.default_backend() == "gpu"
        self.layers_per_program = layers_per_program or (16 if on_gpu else 8)

    def _sibling(self, weights):
        programs = ResidentPrograms(weights.config, self.programs.top)
        return ResidentEngine(
            weights, layers_per_program=self.layers_per_program, programs=programs
        )

    def decode(self, session, tokens_B, active_B, on_routing=None):
        """As `Engine.decode`; between several programs threads would wait."""
        weights = self.weights
        if len(weights.experts) > self.layers_per_program:
            return super().decode(session, tokens_B, active_B, on_routing)
        session.grow(session.growth)
        logits, session.positions_B, session.caches, routings = self.programs.decode(
            weights.top,
            weights.layers,
            weights.experts,
            self._windows,
            (tokens_B, session.positions_B, active_B),
            session.k_B,
            session.caches,
        )
        _tell(routings, 0, on_routing)
        return logits

    def _run_layers(self, session, x, chunk, on_routing):
        experts, size = self.weights.experts, self.layers_per_program
        for first in range(0, len(experts), size):
            group = experts[first : first + size]
            x = self._run_group(session, first, group, x, chunk, on_routing)
        return x

    def _run_group(self, session, first: int, experts, x, chunk, on_routing):
        """Runs a program's layers from `first` on, with their experts."""
        here = slice(first, first + len(experts))
        x, session.caches[here], routings = self.programs.layers(
            self.programs.kinds[here],
            self.weights.layers[here],
            experts,
            self._windows[here],
            x,
            chunk,
            session.caches[here],
        )
        _tell(routings, first, on_routing)
        return x


def _tell(routings, first: int, on_routing) -> None:
    """Calls `on_routing`, if there is one, with those of layers from `first` on."""
    if on_routing is None:
        return
    for layer, routing in enumerate(routings, first):
        if routing is not None:
            on_routing(layer, routing)
