"""The model's own choice, untouched."""

import dataclasses

from moe_edge.model.config import MoeConfig
from moe_edge.route.base import RoutePolicy


@dataclasses.dataclass(frozen=True)
class TopK(RoutePolicy):
    """Hands back what the model's router chose: lossless by construction."""

    name = "topk"
    SOURCE = "the model's router (moe_edge.model.router.choose)"
    needs_resident = False
    lossless = True

    def route(
        self, layer, scores_TE, resident_E, params: MoeConfig, ids_TK, weights_TK
    ):
        return ids_TK, weights_TK
