"""Configs of pruned models: fewer experts a layer, some of which are gone for good.

Where a router's weights are shares of a softmax over all experts, the rows of removed
experts stay: without them every share that is left would grow (`removed_experts`).
Where weights are normalised over the chosen, or are sigmoids, nothing stays.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.model.config import ModelConfig

Kept = Mapping[int, list[int]]  # MoE layer -> ids of the parent, rising


def kept_experts(parent: ModelConfig, listed: Any) -> Kept:
    """The experts that each MoE layer keeps, from a manifest.

    Raises:
      ConfigError: not equally many distinct experts of the parent for each layer.
    """
    E, layers = parent.moe.num_experts, parent.moe_layers
    listed = listed if isinstance(listed, dict) else {}
    kept = {layer: listed.get(str(layer)) for layer in layers}
    sizes = {len(ids) if isinstance(ids, list) else 0 for ids in kept.values()}
    wrong = [
        layer
        for layer, ids in kept.items()
        if not isinstance(ids, list)
        or any(type(i) is not int or not 0 <= i < E for i in ids)
        or ids != sorted({*ids})
    ]
    if wrong or len(sizes) != 1 or len(listed) != len(layers):
        raise ConfigError(
            f"kept names layers {', '.join(map(str, listed)) or 'none'}, wrongly "
            f"{wrong[:4]}; expected for each of layers {[*layers]} equally many rising "
            f"ids from 0 to {E - 1}"
        )
    return kept


def pruned_config(parent: ModelConfig, kept: Kept) -> ModelConfig:
    """The config of `parent` with these experts only.

    Raises:
      ConfigError: less than a token's experts, or a model that cannot be pruned:
        refactored, routed by groups or by SparseMixer's rule.
    """
    moe = parent.moe
    if moe.sub_experts > 1:
        raise ConfigError(
            f"the model is refactored, into {moe.sub_experts} sub-experts an expert; "
            "prune the checkpoint it was made from"
        )
    if moe.num_groups > 1 or moe.scoring == "sparsemixer":
        why = f"routed by {moe.num_groups} groups of experts"
        if moe.scoring == "sparsemixer":
            why = "routed by SparseMixer, whose weights compare neighbouring experts"
        raise ConfigError(
            f"{parent.model_type} is {why}: without some of them it would choose and "
            "weigh others; pruning it is not supported"
        )
    left = len(next(iter(kept.values())))
    if left < moe.top_k:
        raise ConfigError(
            f"{left} experts a layer are left and a token takes {moe.top_k}; remove "
            "fewer"
        )
    are_shares = moe.scoring == "softmax" and not moe.norm_topk
    pruned = dataclasses.replace(
        moe,
        num_experts=left,
        removed_experts=moe.num_experts - left if are_shares else 0,
    )
    return dataclasses.replace(parent, moe=pruned)
