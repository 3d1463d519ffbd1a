"""A route: a token's last choice is left out where it would have to travel."""

import dataclasses

import moe_edge as me
from moe_edge.core.arrays import module_of


@dataclasses.dataclass(frozen=True)
class DropLast(me.Route):
    """Leaves out the last of a token's experts if it is not resident: lossy.

    Attributes:
      last: how many of a token's choices may be left out; its first never is.
    """

    last: int = 1

    name = "my_drop_last"
    SOURCE = "an example"

    def __post_init__(self):
        if self.last < 0:
            raise me.ConfigError(f"last must be 0 or more, got {self.last}")

    @property
    def lossless(self) -> bool:
        return self.last == 0

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        """Expert id E with weight 0 means none; NumPy and jax.numpy alike."""
        xp = module_of(weights_TK)
        E, K = scores_TE.shape[1], ids_TK.shape[1]
        rank_1K = xp.arange(K).reshape(1, K)
        may_go_1K = (rank_1K >= K - self.last) & (rank_1K > 0)
        absent_TK = ~resident_E[xp.minimum(ids_TK, E - 1)]
        gone_TK = may_go_1K & absent_TK
        return xp.where(gone_TK, E, ids_TK), xp.where(gone_TK, 0, weights_TK)
