"""GGUF metadata -> fields of config.json that several architectures share."""

from decimal import Decimal
from typing import Any

from moe_edge.convert.gguf_metadata import Metadata

SOFTMAX, SIGMOID, SOFTMAX_CHOSEN = 1, 2, 3  # expert_gating_func
_ROUTER = "blk.{}.ffn_gate_inp.weight"


def has_bias(meta: Metadata) -> bool:
    """Whether queries, keys and values have biases."""
    names = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return any(name in meta.tensors for name in names)


def gqa(meta: Metadata, *, rotates_part: bool = False, **rope_options) -> dict:
    """Grouped-query attention.

    Args:
      rotates_part: whether the family may rotate the first part of a head only.
      **rope_options: of `rope`.
    """
    heads = meta.integer("attention.head_count")
    found: dict[str, Any] = {
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "rope_parameters": rope(meta, **rope_options),
    }
    key_length = meta.get("attention.key_length")
    if key_length is not None:
        found["head_dim"] = key_length
    else:
        key_length = meta.integer("embedding_length") // max(heads, 1)
    meta.only("attention.value_length", key_length)
    if not rotates_part:
        meta.only("rope.dimension_count", key_length)
        return found
    rotated = meta.integer("rope.dimension_count", key_length)
    if rotated != key_length:
        share = rotated / max(key_length, 1)
        found["rope_parameters"]["partial_rotary_factor"] = share
    return found


def only_router(meta: Metadata, scoring: int, norm: bool | None = None) -> None:
    """Refuses a router with another rule than the only one of its family.

    Args:
      norm: whether weights of the chosen are normalised, where that is part of it.
    """
    meta.only("expert_gating_func", scoring)
    for key in ("expert_weights_scale", "expert_group_count"):
        meta.only(key, 0, 1)
    meta.only("expert_group_used_count", 0, 1)
    if norm is not None:
        meta.only("expert_weights_norm", norm)


def groups(meta: Metadata) -> dict:
    """Groups of experts; a file without them is computed without, as by llama.cpp."""
    return {
        "n_group": meta.get("expert_group_count") or 1,
        "topk_group": meta.get("expert_group_used_count") or 1,
    }


def scaled_router(meta: Metadata) -> dict:
    """DeepSeek-V3's router: sigmoid, normalised or not, scaled."""
    return {
        "routed_scaling_factor": meta.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": meta.get("expert_weights_norm", False),
    }


def dense_layers(meta: Metadata, layers: int) -> list[int]:
    """Layers without a router: dense ones."""
    return [i for i in range(layers) if _ROUTER.format(i) not in meta.tensors]


def rope(
    meta: Metadata, *, log_multiplier: bool = False, truncate: bool | None = None
) -> dict:
    """How positions are rotated: not at all scaled, linear or YaRN.

    Args:
      log_multiplier: whether the family has DeepSeek's `mscale`.
      truncate: of YaRN, which a file cannot say; None: the family has no such field.
    """
    found = {"rope_theta": meta.get("rope.freq_base", 10_000.0)}
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear"))
    kind = meta.get("rope.scaling.type")
    if kind is None:  # llama.cpp's default
        kind = "linear" if factor not in (None, 0, 1) else "none"
    original = meta.get("rope.scaling.original_context_length")
    log_mul = meta.get("rope.scaling.yarn_log_multiplier")
    betas = {
        name: meta.get("rope.scaling.yarn_" + name)
        for name in ("beta_fast", "beta_slow")
    }
    attention_factor = meta.get("rope.scaling.yarn_attn_factor")
    meta.only("rope.scaling.attn_factor", 1)
    if kind == "none":
        return found | {"rope_type": "default"}
    found |= {"rope_type": str(kind)[:60], "factor": factor}
    if kind != "yarn":
        return found  # linear, or refused by name
    meta.only("rope.scaling.yarn_ext_factor", 1, -1)
    found |= {"original_max_position_embeddings": original} | betas
    if attention_factor is not None:
        found["attention_factor"] = attention_factor
    if log_mul:
        if not log_multiplier:
            raise meta.bad("rope.scaling.yarn_log_multiplier", log_mul, "none")
        if not isinstance(log_mul, float):
            raise meta.bad("rope.scaling.yarn_log_multiplier", log_mul, "a number")
        # A tenth of mscale_all_dim; llama.cpp, too, takes mscale to be the same.
        mscale = float(Decimal(repr(log_mul)) * 10)
        found |= {"mscale": mscale, "mscale_all_dim": mscale}
    if truncate is not None:
        found["truncate"] = truncate
    return {name: value for name, value in found.items() if value is not None}
