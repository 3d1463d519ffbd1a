"""Architectures that llama.cpp knows: one entry each, as its converter writes them.

An entry says which model_type it is, how its metadata become fields of config.json, and
which tensors have other names than the table in `gguf_names.py`. `families.py` then
reads the config, so refusals and the meaning of fields stay in one place.
Source: the folder `conversion` and src/models of github.com/ggml-org/llama.cpp, 2026.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from moe_edge.convert import gguf_parts as parts
from moe_edge.convert.gguf_metadata import Metadata

_POST_NORM = {"mlp_norm": "post_attention_norm.weight"}


class Architecture(NamedTuple):
    """How llama.cpp writes a family.

    Attributes:
      model_type: as in config.json, unless `fields` says another one.
      fields: (metadata, common fields) -> further fields of config.json.
      tensors: canonical name -> tensor of a layer, where it is not the common one.
      permuted: whether rows of q and k stand in the order of llama.cpp's own rope.
    """

    model_type: str
    fields: Callable[[Metadata, dict], dict[str, Any]]
    tensors: dict[str, str] = {}
    permuted: bool = False


def _olmoe(meta: Metadata, common: dict) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX)
    return parts.gqa(meta) | {
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "clip_qkv": meta.get("attention.clamp_kqv") or None,
        "attention_bias": parts.has_bias(meta),
    }


def _mixtral(meta: Metadata, common: dict) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX, norm=True)
    window = meta.get("attention.sliding_window") or None
    return parts.gqa(meta) | {"sliding_window": window}


def _qwen2_moe(meta: Metadata, common: dict) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX)
    meta.get("expert_shared_count")
    return parts.gqa(meta) | {
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "qkv_bias": parts.has_bias(meta),
        "shared_expert_intermediate_size": meta.need(
            "expert_shared_feed_forward_length"
        ),
        "mlp_only_layers": parts.dense_layers(meta, common["num_hidden_layers"]),
    }


def _qwen3_moe(meta: Metadata, common: dict) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX)
    return parts.gqa(meta) | {
        "norm_topk_prob": meta.get("expert_weights_norm", True),  # llama.cpp's rule
        "attention_bias": parts.has_bias(meta),
        "mlp_only_layers": parts.dense_layers(meta, common["num_hidden_layers"]),
    }


def _gpt_oss(meta: Metadata, common: dict) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX_CHOSEN, norm=True)
    return parts.gqa(meta, truncate=False) | {
        "sliding_window": meta.get("attention.sliding_window") or None,
        "attention_bias": parts.has_bias(meta),
    }


def _deepseek(meta: Metadata, common: dict) -> dict[str, Any]:
    """V3 routes by sigmoid, V2 by softmax.

    Files from 2025 on describe attention as llama.cpp runs it (one head as wide as the
    latent) and have the model's own widths in keys that end in `_mla`.
    """
    scoring = meta.get("expert_gating_func", parts.SOFTMAX)
    if scoring not in (parts.SOFTMAX, parts.SIGMOID):
        raise meta.bad("expert_gating_func", scoring, "1 (softmax) or 2 (sigmoid)")
    is_v3 = scoring == parts.SIGMOID
    found = _mla(meta) | parts.groups(meta)
    if is_v3:
        found |= parts.scaled_router(meta)
        return found | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    meta.only("expert_weights_norm", False)
    method = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
    scale = meta.get("expert_weights_scale") or 1.0
    return found | {"topk_method": method, "routed_scaling_factor": scale}


def _mla(meta: Metadata) -> dict[str, Any]:
    """DeepSeek's attention with a latent, and its dense and shared layers."""
    meta.only("attention.head_count_kv", 1, meta.integer("attention.head_count"))
    wide, rope_dim = (
        meta.get("attention.key_length"),
        meta.integer("rope.dimension_count"),
    )
    value_dim = meta.get("attention.value_length")
    head_dim = meta.integer("attention.key_length_mla", wide)
    return {
        "kv_lora_rank": meta.need("attention.kv_lora_rank"),
        "q_lora_rank": meta.get("attention.q_lora_rank"),
        "qk_nope_head_dim": head_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": meta.get("attention.value_length_mla", value_dim),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "n_shared_experts": meta.need("expert_shared_count"),
        "rope_parameters": parts.rope(meta, log_multiplier=True),
    }


ARCHITECTURES = {
    "olmoe": Architecture("olmoe", _olmoe),
    "llama": Architecture("mixtral", _mixtral, permuted=True),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "deepseek2": Architecture("deepseek_v2", _deepseek),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, _POST_NORM),
}
