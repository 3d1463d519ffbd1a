"""The jitted programs of a step that the host plans layer by layer.

A MoE layer is cut where the host must decide: `attend` ends with the routing, which
the host reads; `experts` begins once the slots hold what was chosen. Between two such
points nothing needs the host, so a layer's experts and the next layer's attention are
one program (`advance`). Cut at the same seams as `model.transformer.Block`, with the
same kernels, so that every bit equals the resident engine's.
"""

from collections.abc import Hashable
from typing import NamedTuple

import jax
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.engine.programs import Programs, TopPrograms, count_compiled, jit_step
from moe_edge.model.branches import Shared, add_experts, seam
from moe_edge.model.config import ModelConfig
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.experts import choose_method
from moe_edge.model.router import Routing
from moe_edge.predict.device_scores import partial_gate, scores_ahead


class Routed(NamedTuple):
    """A MoE layer between its router and its experts; arrays on the device."""

    x_BSD: jax.Array
    hidden_TD: jax.Array
    shared: Shared
    routing: Routing | None
    wanted_NE: jax.Array | None  # what gate predictors ask for
    words: jax.Array | None = None  # in place of both: see `packed_programs`


class LayerPrograms(Programs):
    """Programs of one model whose expert records have one dtype."""

    def __init__(self, config: ModelConfig, dtype, top: TopPrograms | None = None):
        super().__init__(config, top)
        self.dtype = dtype
        self._is_pairs: dict[int, bool] = {}
        # Other forms of them: `packed_programs` by what is read, `home_programs`.
        self.variants: dict[Hashable, object] = {}
        self.attend = jit_step(
            self.attend_step, static_argnums=0, donate_argnames="cache"
        )
        self.advance = jit_step(
            self._advance, static_argnums=0, donate_argnames="cache"
        )
        self.experts = jit_step(self.experts_step)
        self.start = jit_step(self._start)
        self.wave = jit_step(self._wave, donate_argnames="carry")
        self.finish = jit_step(self._finish)
        self.peek = jit_step(self._peek, static_argnums=0, static_argnames="top_a")

    def check_records(self, dtype) -> None:
        """Raises ConfigError unless they are for expert records of this dtype."""
        if np.dtype(self.dtype) != np.dtype(dtype):
            raise ConfigError(
                f"these programs were made for {np.dtype(self.dtype).name} records, "
                f"the slots hold {np.dtype(dtype).name}; share those of an engine over "
                "the same store"
            )

    def num_compiled(self) -> int:
        variants = self.variants.values()
        return super().num_compiled() + sum(map(count_compiled, variants))

    def is_pairs(self, tokens: int) -> bool:
        """Whether so many tokens meet their experts pair by pair."""
        known = self._is_pairs.get(tokens)
        if known is None:
            kind = self.config.moe.expert_kind
            known = choose_method(tokens, self.dtype, kind=kind) == "pairs"
            self._is_pairs[tokens] = known
        return known

    def _waves(self, routed: Routed) -> ExpertWaves:
        return self.waves_of(routed.hidden_TD.shape[0], self.dtype)

    def attend_step(self, kind, x_BSD, layer, gates, chunk, window, cache):
        """A dense layer as a whole, or a MoE layer up to its routing.

        Returns:
          (x_BSD or Routed, cache).
        """
        block = self.bind(kind, layer)
        if not block.is_moe:
            x_BSD, cache, _ = block(x_BSD, chunk, window, None, None, cache)
            return x_BSD, cache
        (x_BSD, normed_BSD), cache = block.attend(x_BSD, chunk, window, cache)
        hidden_TD, routing = seam(block.route(normed_BSD, chunk))
        shared = seam(block.run_shared(hidden_TD, routing))
        taken_TD, wanted_NE = block.expert_input(hidden_TD, routing), None
        if gates:
            k_T = chunk.k_T(self.config.moe.top_k)
            wanted_NE = scores_ahead(self.config, gates, hidden_TD, taken_TD, k_T)
        return Routed(x_BSD, taken_TD, shared, routing, wanted_NE), cache

    # experts: all chosen experts of a layer stand in slots

    def experts_step(
        self, routed: Routed, slot_of, weights_TK, slots_SR, other_TD=None
    ):
        """The residual stream after the experts.

        Args:
          slot_of: see `ExpertWaves.run`.
          other_TD: what was computed elsewhere, or None.
        """
        carry = self._start(routed)
        carry, _ = self._wave(carry, routed, weights_TK, slots_SR, slot_of)
        return self._finish(routed, carry, weights_TK, other_TD)

    def _advance(self, kind, chosen, layer, gates, chunk, window, cache):
        """`experts` of a layer (its arguments: `chosen`) and `attend` of the next."""
        x_BSD = seam(self.experts_step(*chosen))
        return self.attend_step(kind, x_BSD, layer, gates, chunk, window, cache)

    # The same in waves: start, wave, wave, ..., finish

    def _start(self, routed: Routed):
        return self._waves(routed).start(routed.hidden_TD, routed.routing.ids_TK)

    def _wave(self, carry, routed, weights_TK, slots_SR, slot_of):
        """(carry, scalar that is ready when the slots may be written again)."""
        x_TD, ids_TK = routed.hidden_TD, routed.routing.ids_TK
        run = self._waves(routed).run
        carry = run(carry, x_TD, ids_TK, weights_TK, slots_SR, slot_of)
        return carry, carry[0, 0]

    def _finish(self, routed: Routed, carry, weights_TK, other_TD=None):
        finish = self._waves(routed).finish
        y_TD = seam(finish(carry, routed.routing.ids_TK, weights_TK))
        if other_TD is not None:
            y_TD = y_TD + other_TD
        return add_experts(self.config, routed.x_BSD, y_TD, routed.shared)

    def _peek(self, kind, chosen, layer, gates, chunk, window, cache, top_a):
        """What the next layer would choose after the experts that are here (SMoE)."""
        x_BSD = self.experts_step(*chosen)
        return self.peek_step(kind, x_BSD, layer, chunk, window, cache, top_a)

    def peek_step(self, kind, x_BSD, layer, chunk, window, cache, top_a):
        """`peek` from the state after those experts."""
        block = self.bind(kind, layer)
        return partial_gate(block, x_BSD, chunk, window, cache, top_a)[0]
