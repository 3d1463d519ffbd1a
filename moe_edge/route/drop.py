"""Drop-if-absent: an unimportant expert that is not resident is left out."""

import dataclasses

from moe_edge.core.arrays import module_of
from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import register
from moe_edge.model.config import MoeConfig
from moe_edge.route.base import Route, rescale


@register
@dataclasses.dataclass(frozen=True)
class DropAbsent(Route):
    """Drops absent experts with less than `threshold` of the token's weight sum.

    A token's first expert is never dropped. A dropped one has id E and weight 0.
    """

    threshold: float = 0.05  # share of the weight sum, in [0, 1); 0 drops nothing
    renormalise: bool = True  # a changed token's weights have the sum the model gave

    name = "drop"
    acts_on_absent_only = True
    strength = "threshold"
    rules = ({"renormalise": True}, {"renormalise": False})
    SOURCE = "a peer's rule (drop an absent expert below a share), as baseline"

    def __post_init__(self):
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"threshold must lie in [0, 1), got {self.threshold}")

    @property
    def lossless(self) -> bool:
        return self.threshold == 0

    def route(
        self, layer, scores_TE, resident_E, params: MoeConfig, ids_TK, weights_TK
    ):
        xp = module_of(weights_TK)
        E = scores_TE.shape[1]
        total_T1 = xp.sum(weights_TK, axis=1, keepdims=True)
        absent_TK = ~resident_E[xp.minimum(ids_TK, E - 1)] & (ids_TK < E)
        small_TK = weights_TK < self.threshold * total_T1
        first_1K = (xp.arange(ids_TK.shape[1]) == 0).reshape(1, -1)
        dropped_TK = absent_TK & small_TK & ~first_1K
        new_TK = xp.where(dropped_TK, E, ids_TK)
        new_weights_TK = xp.where(dropped_TK, 0, weights_TK)
        if self.renormalise:
            changed_T1 = xp.any(dropped_TK, axis=1, keepdims=True)
            new_weights_TK = rescale(new_weights_TK, total_T1, changed_T1)
        return new_TK, new_weights_TK
