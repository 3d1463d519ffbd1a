"""Prefer what is here: a bonus on the scores of resident experts."""

import dataclasses
import math

import numpy as np

from moe_edge.core.arrays import module_of
from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import register
from moe_edge.model.config import MoeConfig
from moe_edge.route.base import Route, gate_scores, rescale


@register
@dataclasses.dataclass(frozen=True)
class Prefer(Route):
    """Chooses as if resident experts scored e^bonus times what they do.

    A token's first expert always stays, and counts as resident for the other tokens of
    the step, which loads it anyway. The best resident expert that was not chosen takes
    the place of the worst absent one where its score with the bonus is higher, the next
    best that of the next worst, and so on: with a router that chooses by score these
    are just the K best by scores with the bonus. A newcomer's weight is its own score,
    times the factor that the model gave the token's.
    """

    bonus: float = 0.5  # on the logarithm of a score, from 0; 0 changes nothing
    renormalise: bool = False  # a changed token's weights have the sum the model gave

    name = "prefer"
    acts_on_absent_only = True
    strength = "bonus"
    SOURCE = "ours: a bonus for resident experts, as cache-aware routers are trained to"

    def __post_init__(self):
        if not 0 <= self.bonus < math.inf:
            raise ConfigError(
                f"bonus must be a number from 0, got {self.bonus}; 0 switches it off"
            )

    @property
    def lossless(self) -> bool:
        return self.bonus == 0

    def route(
        self, layer, scores_TE, resident_E, params: MoeConfig, ids_TK, weights_TK
    ):
        if self.lossless:
            return ids_TK, weights_TK
        xp = module_of(scores_TE)
        T, E = scores_TE.shape
        K = ids_TK.shape[1]
        scores_TE = gate_scores(scores_TE, params)
        experts = xp.arange(E, dtype=np.int32).reshape(1, 1, E)
        is_first_E = xp.any(ids_TK[:, :1] == experts[0], axis=0)
        here_1E = (resident_E | is_first_E).reshape(1, E)
        chosen_TE = xp.any(ids_TK[:, :, None] == experts, axis=1)
        seat_TK = xp.minimum(ids_TK, E - 1)
        own_TK = xp.where(ids_TK < E, xp.take_along_axis(scores_TE, seat_TK, 1), 0)
        absent_TK = (ids_TK < E) & ~xp.take_along_axis(
            xp.broadcast_to(here_1E, (T, E)), seat_TK, 1
        )

        rank_TE = xp.where(here_1E & ~chosen_TE, scores_TE, -1)
        best_TK = xp.argsort(-rank_TE, axis=1, stable=True)[:, :K].astype(np.int32)
        best_scores_TK = xp.take_along_axis(rank_TE, best_TK, 1)
        # The worst absent one meets the best newcomer.
        key_TK = xp.where(absent_TK, own_TK, np.inf)
        nth_TK = xp.argsort(xp.argsort(key_TK, axis=1, stable=True), axis=1)
        new_scores_TK = xp.take_along_axis(best_scores_TK, nth_TK, 1)
        bonus = np.float32(math.exp(min(self.bonus, 80.0)))  # finite in float32
        is_new_TK = absent_TK & (new_scores_TK >= 0) & (new_scores_TK * bonus > own_TK)
        new_TK = xp.where(is_new_TK, xp.take_along_axis(best_TK, nth_TK, 1), ids_TK)

        total_T1 = xp.sum(weights_TK, axis=1, keepdims=True)
        own_T1 = xp.sum(own_TK, axis=1, keepdims=True)
        factor_T1 = total_T1 / xp.maximum(own_T1, np.finfo(np.float32).tiny)
        new_weights_TK = xp.where(is_new_TK, new_scores_TK * factor_T1, weights_TK)
        if self.renormalise:
            changed_T1 = xp.any(is_new_TK, axis=1, keepdims=True)
            new_weights_TK = rescale(new_weights_TK, total_T1, changed_T1)
        return new_TK, new_weights_TK
