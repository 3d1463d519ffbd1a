"""Config fields that families share: sizes, experts, attention."""

from typing import Any

from moe_edge.convert.hf_config import REQUIRED, Fields
from moe_edge.convert.rope_config import (
    mla_softmax_scale,
    rope_config,
    rope_dict,
    rotated_width,
    stretch_theta,
)
from moe_edge.core.checks import ConfigError
from moe_edge.model.attention_config import AttentionConfig
from moe_edge.model.config import MoeConfig

_MAX_EXPERTS = 65_536


def read_moe(
    fields: Fields,
    *,
    top_k: Any = REQUIRED,
    width: Any = REQUIRED,
    shared: int | None = None,
    norm: bool | None = None,
    **parts,
) -> MoeConfig:
    """Router and experts, by the family's names.

    Args:
      top_k, width: where the file is silent.
      shared: the same, of the shared expert's width in experts; None: it has none.
      norm: the same, of `norm_topk_prob`; None: the family has no such field.
      **parts: further fields of `MoeConfig`.
    """
    names = fields.experts
    experts = fields.int(names.experts[0], aliases=names.experts[1:])
    if experts > _MAX_EXPERTS:
        raise ConfigError(
            f"{names.experts[0]} is {experts}, expected at most {_MAX_EXPERTS}"
        )
    expert_dim = fields.int(names.width[0], width)
    if norm is not None:
        parts["norm_topk"] = fields.bool("norm_topk_prob", norm)
    if names.shared:
        null = 0 if shared is None else None
        count = fields.int(names.shared[0], shared, low=0, null=null)
        parts["shared_dim"] = expert_dim * count
    return MoeConfig(
        num_experts=experts,
        top_k=fields.int(names.top_k[0], top_k, aliases=names.top_k[1:]),
        expert_dim=expert_dim,
        **{"activation": fields.activation} | parts,
    )


def read_moe_v3(
    fields: Fields,
    *,
    top_k: Any,
    width: Any,
    shared: Any,
    scaling: float = 1.0,
    groups: tuple[int, int] = (1, 1),
    norm: bool = True,
) -> MoeConfig:
    """Experts chosen as in DeepSeek-V3: sigmoid, a bias for the choice, groups.

    Args:
      top_k, width, shared, scaling, groups, norm: where the file is silent; groups are
        how many there are and how many are chosen.
    Raises:
      ConfigError: groups of fewer than two experts, besides what `read_moe` refuses.
    """
    fields.only("topk_method", ("noaux_tc", None), "the only method of this family")
    moe = read_moe(
        fields,
        top_k=top_k,
        width=width,
        shared=shared,
        norm=norm,
        scoring="sigmoid",
        routed_scaling=fields.float("routed_scaling_factor", scaling, null=1.0),
        num_groups=fields.int("n_group", groups[0], null=1),
        topk_groups=fields.int("topk_group", groups[1], null=1),
        group_score="top2",
        correction_bias=True,
    )
    if moe.num_experts // moe.num_groups < 2:
        raise ConfigError(
            f"n_group {moe.num_groups} leaves fewer than two of {moe.num_experts} "
            "experts in a group, which scores groups by their best two"
        )
    return moe


def read_mtp(fields: Fields) -> None:
    """Modules that predict later tokens: nothing here computes them."""
    fields.int(
        "num_nextn_predict_layers", 1, low=0, aliases=("num_mtp_layers",), null=0
    )


def read_gqa(
    fields: Fields,
    *,
    kv_heads: Any = None,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    default_rope: dict | None = None,
    rotated: float | None = None,
    interleaved: bool = False,
    stretched: bool = False,
    bias: bool | None = None,
    **parts,
) -> AttentionConfig:
    """Grouped-query attention.

    Args:
      kv_heads, head_dim, theta, default_rope: where the file is silent; None, and
        null in the file: as many heads, the width D / H.
      rotated: the same, of `partial_rotary_factor`; None: the family rotates whole
        heads.
      interleaved: whether rotary pairs are (2i, 2i + 1), not halves of the head.
      stretched: whether `alpha` of a dynamic rope stretches theta (HunYuan).
      bias: where the file is silent, of `attention_bias`, which gives all four
        products a bias; None: the family has no such field.
      **parts: further fields of `AttentionConfig`.
    """
    heads = fields.int("num_attention_heads")
    even = fields.int("hidden_size") // heads
    head_dim = fields.int("head_dim", head_dim, null=head_dim or even)
    parameters = rope_dict(fields, theta, default_rope)
    if stretched:
        stretch_theta(fields, parameters, head_dim)
    width = head_dim
    if rotated is not None:
        width = rotated_width(fields, parameters, head_dim, rotated)
    if bias is not None:
        parts["qkv_bias"] = parts["out_bias"] = fields.bool("attention_bias", bias)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.int("num_key_value_heads", kv_heads, null=heads),
        head_dim=head_dim,
        rope=rope_config(fields, parameters, width, interleaved),
        **parts,
    )


def end_positions(positions: int, end: int, why: str) -> dict:
    """Arguments of `ModelConfig` that end a longer context at a number of positions.

    Args:
      positions: of the context.
      why: what would come behind it.
    """
    if positions <= end:
        return {}
    return {"max_positions": end, "positions_end": why}


def read_mla(
    fields: Fields,
    interleaved: bool,
    *,
    nope: int = 128,
    values: int = 128,
    q_rank: int = 1536,
) -> AttentionConfig:
    """Multi-head latent attention, as of DeepSeek-V2 and V3.

    Args:
      nope, values, q_rank: where the file is silent.
    """
    for name in ("head_dim", "qk_head_dim"):
        fields.get(name)  # derived from the rope and nope widths
    heads = fields.int("num_attention_heads")
    if fields.int("num_key_value_heads", None, null=heads) != heads:
        raise ConfigError(
            f"{fields.family}: num_key_value_heads is "
            f"{fields.raw['num_key_value_heads']}, expected num_attention_heads={heads}"
        )
    nope = fields.int("qk_nope_head_dim", nope)
    rope_dim = fields.int("qk_rope_head_dim", 64)
    rank = fields.get("q_lora_rank", q_rank)
    parameters = rope_dict(fields, 10_000.0)
    return AttentionConfig(
        kind="mla",
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope_dim,
        rope=rope_config(fields, parameters, rope_dim, interleaved),
        softmax_scale=mla_softmax_scale(fields, parameters, nope + rope_dim),
        kv_lora_rank=fields.int("kv_lora_rank", 512),
        q_lora_rank=None if rank is None else fields.int("q_lora_rank", q_rank),
        nope_dim=nope,
        v_head_dim=fields.int("v_head_dim", values),
        # transformers builds both latent norms with RMSNorm's own default.
        lora_norm_eps=1e-6,
    )
