"""Which parts of a model fit together; `config.py` says what they are."""

import math
from typing import TYPE_CHECKING

from moe_edge.core.checks import ConfigError, check_count, check_known
from moe_edge.model.attention_config import AttentionConfig, check_attention

if TYPE_CHECKING:
    from moe_edge.model.config import ModelConfig, MoeConfig

SCORINGS = ("softmax", "sigmoid", "softmax_topk", "sparsemixer")
GROUP_SCORES = ("max", "top2")
ROUNDINGS = ("float32", "int8")  # of what few vectors are
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
NORMS = ("rms", "layer")
# How sub-experts are chosen: a router row each, or their parents' router and then
# their gate neurons (model/proxy_gate.py) or rows (model/calibrated_gate.py).
PROXY_GATES = ("proxy_pattern", "proxy_global")
GATES = ("linear", *PROXY_GATES, "calibrated")


def check_config(config: "ModelConfig") -> None:
    """Raises ConfigError unless the parts of a model fit together."""
    attention, moe = config.attention, config.moe
    for kind, value, known in (
        ("router scoring", moe.scoring, SCORINGS),
        ("group score", moe.group_score, GROUP_SCORES),
        ("expert activation", moe.activation, ACTIVATIONS),
        ("activation", config.activation, ACTIVATIONS),
        ("activations", config.activations, ROUNDINGS),
        ("gate", moe.gate, GATES),
        ("norm", config.norm, NORMS),
    ):
        check_known(kind, value, known)
    sizes = {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "num_layers": config.num_layers,
        "num_experts": moe.num_experts,
        "expert_dim": moe.expert_dim,
        "max_positions": config.max_positions,
    }
    for name, value in sizes.items():
        check_count(name, value)
    check_attention(attention)
    for each in config.other_attention:
        if isinstance(each, AttentionConfig):
            check_attention(each)
    _check_kinds(config)
    if config.layer_scale and config.dense_layers:
        raise ConfigError(
            "a layer_scale is implemented for layers with experts, got dense "
            f"layers {config.dense_layers}"
        )
    if moe.own_norms and not (
        config.norm_before and config.norm_after and config.norm == "rms"
    ):
        raise ConfigError("own_norms of a MoE layer need RMSNorms on both sides")
    if not 1 <= moe.top_k <= moe.max_top_k:
        limit = "parent_top_k x sub_experts" if moe.keeps_router else "num_experts"
        raise ConfigError(
            f"top_k must be in 1..{limit}={moe.max_top_k}, got {moe.top_k}"
        )
    _check_split(moe)
    if moe.input_scaled and moe.top_k != 1:
        raise ConfigError(
            "experts whose input is scaled compute one a token: another scale for "
            f"each of several is not implemented, got top_k {moe.top_k}; use 1"
        )
    if moe.num_parents % moe.num_groups or not 1 <= moe.topk_groups <= moe.num_groups:
        raise ConfigError(
            f"num_groups {moe.num_groups} must divide num_experts "
            f"{moe.num_parents}, and topk_groups {moe.topk_groups} lie in "
            f"1..{moe.num_groups}"
        )
    if moe.topk_groups * (moe.num_experts // moe.num_groups) < moe.top_k:
        raise ConfigError(
            f"top_k {moe.top_k} exceeds the {moe.topk_groups} chosen groups of "
            f"{moe.num_experts // moe.num_groups} experts"
        )
    if attention.windows and len(attention.windows) != config.num_layers:
        raise ConfigError(
            f"attention windows name {len(attention.windows)} layers, the model "
            f"has {config.num_layers}"
        )
    if config.indexer is not None and config.max_positions > config.indexer.top_k:
        raise ConfigError(
            f"max_positions {config.max_positions} exceeds the {config.indexer.top_k} "
            "positions up to which attention is full without its indexer"
        )
    if not (config.norm_before or config.norm_after):
        raise ConfigError(
            "a layer needs norms before or after attention and MLP, got neither"
        )
    if config.dense_layers and not config.dense_dim:
        raise ConfigError("dense layers need dense_dim > 0")
    if any(not 0 <= layer < config.num_layers for layer in config.dense_layers):
        raise ConfigError(
            f"dense layers {config.dense_layers} must lie in 0..{config.num_layers - 1}"
        )


def _check_kinds(config: "ModelConfig") -> None:
    """Raises ConfigError unless every layer has one of the kinds of attention."""
    kinds, others = config.attention_kinds, config.other_attention
    if bool(kinds) != bool(others) or any(each.windows for each in others):
        raise ConfigError(
            "attention_kinds name the kind of every layer where there are "
            "other_attention, whose windows stand in attention"
        )
    found = sorted(set(kinds))
    if kinds and (
        len(kinds) != config.num_layers or found != list(range(len(others) + 1))
    ):
        raise ConfigError(
            f"attention_kinds name {len(kinds)} layers and kinds {found}, expected "
            f"{config.num_layers} layers and kinds 0..{len(others)}"
        )


def _check_split(moe: "MoeConfig") -> None:
    """Raises ConfigError unless the fields of a refactored model fit together."""
    U, shares = moe.sub_experts, moe.rank_shares
    if U < 1 or moe.num_experts % U:
        raise ConfigError(
            f"sub_experts must divide num_experts {moe.num_experts}, got {U}"
        )
    if U > 1 and not 1 <= moe.parent_top_k <= moe.num_parents:
        raise ConfigError(
            f"parent_top_k must be in 1..{moe.num_parents}, got {moe.parent_top_k}"
        )
    if moe.keeps_router and (moe.own_norms or moe.expert_scale):
        raise ConfigError(
            f"a {moe.gate} gate judges blocks by what the router takes, which experts "
            "with norms or factors of their own do not take; use a linear gate"
        )
    if not moe.has_proxy_gate:
        if moe.gate_neurons or shares:
            raise ConfigError("gate_neurons and rank_shares need a proxy gate")
        return
    is_count = type(moe.gate_neurons) is int
    if not (is_count and 1 <= moe.gate_neurons <= moe.expert_dim):
        raise ConfigError(
            f"gate_neurons must be in 1..{moe.expert_dim} (the neurons of a "
            f"sub-expert), got {moe.gate_neurons}"
        )
    expected = (moe.parent_top_k, U) if moe.gate == "proxy_pattern" else (0, 0)
    found = (len(shares), len(shares[0]) if shares else 0)
    if found != expected or any(len(row) != expected[1] for row in shares):
        raise ConfigError(
            f"rank_shares of a {moe.gate} gate must be {expected[0]} rows of "
            f"{expected[1]} numbers, got {found}"
        )
    if not all(math.isfinite(share) and share >= 0 for row in shares for share in row):
        raise ConfigError("rank_shares must be finite numbers of at least 0")
