"""SMoE's expert-cache router: unimportant absent experts give way to resident ones."""

import dataclasses

import numpy as np

from moe_edge.core.arrays import module_of, take_rows
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.plug_in import register
from moe_edge.model.config import MoeConfig
from moe_edge.route.base import Route, gate_scores, rescale


@register
@dataclasses.dataclass(frozen=True)
class Substitute(Route):
    """Replaces absent low-score experts by resident ones of nearly the same score.

    Per token, s = the best score that was not chosen (the (k+1)-th highest). Chosen
    with S >= (1 + a) s: top-score, always kept. Chosen with S < (1 + a) s: low-score,
    kept if resident or in another token's top-score set. Not chosen with
    S > (1 - a) s, and resident or in another token's top-score set: a substitute. An
    absent low-score expert is replaced by the best unused substitute; when there are
    fewer of these than absent ones, the best absent ones stay (and must be loaded).
    """

    a: float = 0.2  # the tolerance, in [0, 1); 0 returns the model's choice bit for bit
    # The weight of a substitute: `own` (its own score) or `replaced` (the weight of the
    # expert whose place it takes). The paper does not say which.
    weights: str = "own"
    renormalise: bool = False  # a changed token's weights have the sum the model gave

    name = "substitute"
    acts_on_absent_only = True
    strength = "a"
    # `replaced` keeps the weights' sum by itself, so renormalising changes nothing.
    rules = (
        {"weights": "own", "renormalise": False},
        {"weights": "own", "renormalise": True},
        {"weights": "replaced", "renormalise": False},
    )
    SOURCE = "SMoE, section IV-B, by its prose; printed Alg. 1 drops the residency test"

    def __post_init__(self):
        if not 0 <= self.a < 1:
            raise ConfigError(f"a must lie in [0, 1), got {self.a}; 0 switches it off")
        check_known("weight rule", self.weights, ("own", "replaced"))

    @property
    def lossless(self) -> bool:
        return self.a == 0

    def route(
        self, layer, scores_TE, resident_E, params: MoeConfig, ids_TK, weights_TK
    ):
        """As Route.route; also inside jit. All resident: nothing is replaced.

        Replaced experts are taken in the order of ids_TK, which is by score unless
        a correction bias or groups took part in the choice.
        """
        xp = module_of(scores_TE)
        E = scores_TE.shape[1]
        scores_TE = gate_scores(scores_TE, params)
        experts = xp.arange(E, dtype=np.int32).reshape(1, 1, E)
        chosen_TE = (ids_TK[:, :, None] == experts).any(axis=1)
        s_T1 = xp.where(chosen_TE, -1, scores_TE).max(axis=1, keepdims=True)
        top_TE = chosen_TE & (scores_TE >= (1 + self.a) * s_T1)
        # A low-score or unchosen expert is in no top-score set of its own token, so
        # any token's set is another token's.
        here_1E = (resident_E | top_TE.any(axis=0)).reshape(1, E)
        absent_TE = chosen_TE & ~top_TE & ~here_1E
        fits_TE = ~chosen_TE & (scores_TE > (1 - self.a) * s_T1) & here_1E

        rank_TE = xp.where(fits_TE, scores_TE, -1)
        best_TK = xp.argsort(-rank_TE, axis=1, stable=True)[:, : ids_TK.shape[1]]
        real_TK = ids_TK < E
        seat_TK = xp.where(real_TK, ids_TK, 0)
        absent_TK = take_rows(absent_TE, seat_TK) & real_TK
        # Substitutes go to the last absent ones; among those the first gets the best.
        left_TK = absent_TK[:, ::-1].cumsum(axis=1)[:, ::-1]
        num_fits_T1 = fits_TE.sum(axis=1, keepdims=True)
        replaced_TK = absent_TK & (left_TK <= num_fits_T1)
        nth_TK = xp.maximum(replaced_TK.cumsum(axis=1) - 1, 0)
        substitute_TK = take_rows(best_TK, nth_TK).astype(np.int32)
        new_TK = xp.where(replaced_TK, substitute_TK, ids_TK)
        if self.weights == "replaced":
            return new_TK, weights_TK

        old_TK = xp.where(real_TK, take_rows(scores_TE, seat_TK), 0)
        total_T1 = weights_TK.sum(axis=1, keepdims=True)
        factor_T1 = total_T1 / xp.maximum(
            old_TK.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny
        )
        own_TK = take_rows(scores_TE, substitute_TK) * factor_T1
        new_weights_TK = xp.where(replaced_TK, own_TK, weights_TK)
        if self.renormalise:
            changed_T1 = replaced_TK.any(axis=1, keepdims=True)
            new_weights_TK = rescale(new_weights_TK, total_T1, changed_T1)
        return new_TK, new_weights_TK
