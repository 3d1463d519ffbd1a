"""The jitted programs of a layer whose experts are on several machines.

A layer with all its chosen experts here runs as in the layered engine (`advance`).
Otherwise its sum waits for others: `rows` computes the pairs whose blocks are here,
`join` puts rows from elsewhere in their places and sums in the resident engine's order.
"""

import jax
import jax.numpy as jnp

from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.programs import jit_step
from moe_edge.model.branches import add_experts, seam
from moe_edge.model.config import ModelConfig


class PlacedPrograms(LayerPrograms):
    """Programs of one model, for callers and for those who answer.

    Attributes:
      device: that runs all but the experts, where these are on several
        (`home_programs`); None: the default one runs everything.
    """

    device: jax.Device | None = None

    def __init__(self, config: ModelConfig, dtype):
        super().__init__(config, dtype)
        self.rows = jit_step(self._rows)
        # A program of its own where sums are no loop: XLA would put the choice of rows
        # into the sum and round it differently, whatever barrier stands between.
        self.merge = jit_step(_merge)
        self.join = jit_step(self._join)
        self.join_advance = jit_step(
            self._join_advance, static_argnums=0, donate_argnames="cache"
        )

    def _rows(self, x_TD, ids_TK, slots_SR, slot_of):
        """Outputs of pairs whose blocks are in slots: `ExpertWaves.rows`."""
        waves = self.waves_of(x_TD.shape[0], self.dtype)
        return waves.rows(x_TD, ids_TK, slots_SR, slot_of)

    def _join(self, routed: Routed, here, away=None, away_P=None):
        """The residual stream after the experts.

        Args:
          here, away: rows [P, D] of pairs computed on this machine and elsewhere; away
            None: `here` has all rows.
          away_P: bool, which rows come from elsewhere.
        """
        ids_TK, weights_TK = routed.routing.ids_TK, routed.routing.weights_TK
        rows_PD = here if away is None else _merge(here, away, away_P)
        y_TD = self._waves(routed).sum_rows(rows_PD, ids_TK, weights_TK)
        return add_experts(self.config, routed.x_BSD, seam(y_TD), routed.shared)

    def _join_advance(self, kind, chosen, layer, gates, chunk, window, cache):
        """`join` of a layer (its arguments: `chosen`) and `attend` of the next."""
        x_BSD = seam(self._join(*chosen))
        return self.attend_step(kind, x_BSD, layer, gates, chunk, window, cache)


def _merge(here, away, away_P):
    """Rows of all pairs `[P, D]`."""
    return jnp.where(away_P[:, None], away, here)
