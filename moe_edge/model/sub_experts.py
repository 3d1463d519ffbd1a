"""Configs of refactored models: experts split into sub-experts, K chosen per run.

MoE-Prism, sections 4 and 5: a parent expert of F neurons becomes U blocks of F / U,
and how many blocks K a token computes is an operating point of the same weights.
"""

import dataclasses

from moe_edge.core.checks import ConfigError, check_divides
from moe_edge.model.config import ModelConfig


def split_config(
    parent: ModelConfig,
    subs: int,
    *,
    gate: str = "linear",
    gate_neurons: int = 0,
    rank_shares: tuple[tuple[float, ...], ...] = (),
) -> ModelConfig:
    """The config of `parent` with every expert split into `subs` blocks.

    top_k becomes all blocks of the parent's k experts.

    Raises:
      ConfigError: F not divisible by `subs` (its divisors are named), a parent that
        is split already, or a linear gate where groups are scored by two experts.
    """
    moe = parent.moe
    if moe.sub_experts != 1:
        raise ConfigError(
            f"the model is refactored already, into {moe.sub_experts} sub-experts an "
            "expert; refactor the checkpoint it was made from"
        )
    check_divides("sub-experts", subs, "neurons", moe.expert_dim)
    if gate == "linear" and moe.num_groups > 1 and moe.group_score == "top2":
        raise ConfigError(
            "a linear gate copies router rows, which changes the sum of a group's two "
            "best experts; use a proxy gate for models routed by groups"
        )
    split = dataclasses.replace(
        moe,
        num_experts=moe.num_experts * subs,
        top_k=moe.top_k * subs,
        expert_dim=moe.expert_dim // subs,
        sub_experts=subs,
        parent_top_k=moe.top_k,
        gate=gate,
        gate_neurons=gate_neurons,
        rank_shares=rank_shares,
    )
    return dataclasses.replace(parent, moe=split)


def at_k(config: ModelConfig, k: int | None) -> ModelConfig:
    """The config with K experts a token; in a refactored model K sub-experts.

    None leaves it as it is.

    Raises:
      ConfigError: k outside of what the gate defines.
    """
    if k is None:
        return config
    limit = config.moe.max_top_k
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= limit:
        unit = "sub-experts" if config.moe.sub_experts > 1 else "experts"
        raise ConfigError(
            f"k must be a number of {unit} in 1..{limit}, got {k!r} (the model's own "
            f"is {config.moe.top_k})"
        )
    if k == config.moe.top_k:
        return config
    moe = dataclasses.replace(config.moe, top_k=k)
    return dataclasses.replace(config, moe=moe)
