"""Prefer what is here: a bonus on the scores of resident experts."""

import dataclasses
import math

import numpy as np

from moe_edge.core.arrays import module_of, take_rows
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
        E, K = scores_TE.shape[1], ids_TK.shape[1]
        scores_TE = gate_scores(scores_TE, params)
        experts = xp.arange(E, dtype=np.int32).reshape(1, 1, E)
        is_TKE = ids_TK[:, :, None] == experts
        here_E = resident_E | is_TKE[:, 0].any(axis=0)
        real_TK, seat_TK = ids_TK < E, xp.minimum(ids_TK, E - 1)
        own_TK = xp.where(real_TK, take_rows(scores_TE, seat_TK), 0)
        absent_TK = real_TK & ~here_E[seat_TK]

        rank_TE = xp.where(here_E[None] & ~is_TKE.any(axis=1), scores_TE, -1)
        best_TK = xp.argsort(-rank_TE, axis=1, stable=True)[:, :K].astype(np.int32)
        best_scores_TK = take_rows(rank_TE, best_TK)
        # The worst absent one meets the best newcomer.
        key_TK = xp.where(absent_TK, own_TK, np.inf)
        nth_TK = xp.argsort(xp.argsort(key_TK, axis=1, stable=True), axis=1)
        new_scores_TK = take_rows(best_scores_TK, nth_TK)
        bonus = np.float32(math.exp(min(self.bonus, 80.0)))  # finite in float32
        is_new_TK = absent_TK & (new_scores_TK >= 0) & (new_scores_TK * bonus > own_TK)
        new_TK = xp.where(is_new_TK, take_rows(best_TK, nth_TK), ids_TK)

        total_T1 = weights_TK.sum(axis=1, keepdims=True)
        own_T1 = own_TK.sum(axis=1, keepdims=True)
        factor_T1 = total_T1 / xp.maximum(own_T1, np.finfo(np.float32).tiny)
        new_weights_TK = xp.where(is_new_TK, new_scores_TK * factor_T1, weights_TK)
        if self.renormalise:
            changed_T1 = is_new_TK.any(axis=1, keepdims=True)
            new_weights_TK = rescale(new_weights_TK, total_T1, changed_T1)
        return new_TK, new_weights_TK
