"""Architectures that llama.cpp knows: one entry each, as its converter writes them.

An entry says which model_type it is, how its metadata become fields of config.json, and
which tensors have other names than the table in `gguf_names.py`. `families.py` then
reads the config, so refusals and the meaning of fields stay in one place.
Source: the folder `conversion` and src/models of github.com/ggml-org/llama.cpp, 2026.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from moe_edge.convert import gguf_layer_kinds as kinds
from moe_edge.convert import gguf_parts as parts
from moe_edge.convert import gguf_states as states
from moe_edge.convert.gguf_metadata import Metadata

_POST_NORM = {"mlp_norm": "post_attention_norm.weight"}


class Architecture(NamedTuple):
    """How llama.cpp writes a family.

    Attributes:
      model_type: as in config.json, unless `fields` says another one.
      fields: metadata -> fields of config.json besides those that all have.
      tensors: canonical name -> tensor of a layer, where it is not the common one.
      permuted: whether rows of q and k stand in the order of llama.cpp's own rope.
    """

    model_type: str
    fields: Callable[[Metadata], dict[str, Any]]
    tensors: dict[str, str] = {}
    permuted: bool = False


def _olmoe(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX)
    return parts.gqa(meta) | {
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "clip_qkv": meta.get("attention.clamp_kqv") or None,
    }


def _mixtral(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX, norm=True)
    window = meta.get("attention.sliding_window") or None
    return parts.gqa(meta) | {"sliding_window": window}


def _qwen2_moe(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX)
    meta.get("expert_shared_count")
    return parts.gqa(meta) | {
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "attention_bias": None,
        "qkv_bias": parts.has_bias(meta),
        "shared_expert_intermediate_size": meta.need(
            "expert_shared_feed_forward_length"
        ),
        "mlp_only_layers": parts.dense_layers(meta),
    }


def _qwen3_moe(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX)
    return parts.gqa(meta) | {
        "norm_topk_prob": meta.get("expert_weights_norm", True),  # llama.cpp's rule
        "mlp_only_layers": parts.dense_layers(meta),
    }


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX_CHOSEN, norm=True)
    return parts.gqa(meta, truncate=False) | {
        "sliding_window": meta.get("attention.sliding_window") or None,
    }


def _deepseek_v1(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX, norm=False)
    own = {"norm_topk_prob": False}
    return parts.gqa(meta) | parts.shared_and_dense(meta) | own


def _deepseek(meta: Metadata) -> dict[str, Any]:
    """V3, Kimi-K2 and GLM-4.7-Flash route by sigmoid, V2 by softmax.

    Files from 2025 on describe attention as llama.cpp runs it (one head as wide as the
    latent) and have the model's own widths in keys that end in `_mla`.
    """
    has_correction = any("exp_probs_b" in name for name in meta.tensors)
    default = parts.SIGMOID if has_correction else parts.SOFTMAX
    scoring = meta.get("expert_gating_func", default)
    if scoring == parts.SIGMOID:
        own = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
        return _mla(meta) | parts.router_v3(meta) | own
    if scoring != parts.SOFTMAX:
        raise meta.bad("expert_gating_func", scoring, "1 (softmax) or 2 (sigmoid)")
    meta.only("expert_weights_norm", False)
    groups = parts.groups(meta)
    method = "greedy" if groups["n_group"] == 1 else "group_limited_greedy"
    scale = meta.get("expert_weights_scale") or 1.0
    own = {"topk_method": method, "routed_scaling_factor": scale}
    return _mla(meta) | groups | own


def _mla(meta: Metadata) -> dict[str, Any]:
    """DeepSeek's attention with a latent, and its dense and shared layers."""
    meta.only("attention.head_count_kv", 1, meta.integer("attention.head_count"))
    wide = meta.get("attention.key_length")
    rope_dim = meta.integer("rope.dimension_count")
    value_dim = meta.get("attention.value_length")
    head_dim = meta.integer("attention.key_length_mla", wide)
    return {
        "kv_lora_rank": meta.need("attention.kv_lora_rank"),
        "q_lora_rank": meta.get("attention.q_lora_rank"),
        "qk_nope_head_dim": head_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": meta.get("attention.value_length_mla", value_dim),
        "rope_parameters": parts.rope(meta, log_multiplier=True),
    } | parts.shared_and_dense(meta)


def _deepseek_v32(meta: Metadata) -> dict[str, Any]:
    """DeepSeek-V3's parts and an indexer."""
    own = {
        "index_n_heads": meta.need("attention.indexer.head_count"),
        "index_head_dim": meta.need("attention.indexer.key_length"),
        "index_topk": meta.need("attention.indexer.top_k"),
        "num_nextn_predict_layers": 0,
    }
    return _mla(meta) | parts.router_v3(meta) | own


def _glm_moe_dsa(meta: Metadata) -> dict[str, Any]:
    """The same; tensors tell which layers have an indexer of their own."""
    meta.raw("attention.indexer.types")
    name = "blk.{}.indexer.attn_k.weight"
    types = [
        "full" if name.format(layer) in meta.tensors else "shared"
        for layer in range(meta.layers)
    ]
    return _deepseek_v32(meta) | {"indexer_types": types}


def _glm4_moe(meta: Metadata) -> dict[str, Any]:
    """GLM-4.5 to 4.7, and Solar Open, which rotates whole heads."""
    own = {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.tensors,
        "num_nextn_predict_layers": 0,
    }
    attention = parts.gqa(meta, rotated="partial_rotary_factor")
    return attention | parts.router_v3(meta) | parts.shared_and_dense(meta) | own


def _dots1(meta: Metadata) -> dict[str, Any]:
    own = {"sliding_window": None}
    attention = parts.gqa(meta)
    return attention | parts.router_v3(meta) | parts.shared_and_dense(meta) | own


def _minimax_m2(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SIGMOID, norm=True)
    return parts.gqa(meta, rotated="rotary_dim")


def _ernie4_5_moe(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX, norm=True)
    return parts.gqa(meta) | {
        "moe_num_shared_experts": meta.get("expert_shared_count", 0),
        "moe_layer_interval": meta.get("interleave_moe_layer_step", 1),
        "moe_layer_start_index": meta.get("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
    }


def _hunyuan_v1_moe(meta: Metadata) -> dict[str, Any]:
    """The file's theta has the stretching of a dynamic rope in it."""
    parts.only_router(meta, parts.SOFTMAX, norm=True)
    meta.only("expert_shared_count", 1)
    return parts.gqa(meta)


def _granitemoe(meta: Metadata) -> dict[str, Any]:
    """Multipliers; one key tells whether there is a shared expert."""
    parts.only_router(meta, parts.SOFTMAX, norm=True)
    attention = parts.gqa(meta)
    shared = meta.get("expert_shared_feed_forward_length")
    own = {
        "attention_multiplier": meta.get("attention.scale")
        or max(meta.even_head, 1) ** -0.5,
        "embedding_multiplier": meta.get("embedding_scale") or 1.0,
        "residual_multiplier": meta.get("residual_scale") or 1.0,
        "logits_scaling": meta.need("logit_scale"),
    }
    if shared:
        own |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return attention | own


def _phimoe(meta: Metadata) -> dict[str, Any]:
    """The noise of the choice is the published models', which a file cannot say."""
    parts.only_router(meta, parts.SOFTMAX)
    own = {
        "lm_head_bias": "output.bias" in meta.tensors,
        "sliding_window": meta.get("attention.sliding_window") or None,
        "router_jitter_noise": 0.01,
    }
    attention = parts.gqa(meta, long_magnitude=_PHIMOE_MAGNITUDE)
    return attention | own


# Of Phi-3.5-MoE, `short_mscale` and `long_mscale`; llama.cpp computes another one.
_PHIMOE_MAGNITUDE = 1.243163121016122


ARCHITECTURES = {
    "olmoe": Architecture("olmoe", _olmoe),
    "llama": Architecture("mixtral", _mixtral, permuted=True),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "deepseek": Architecture("deepseek", _deepseek_v1, permuted=True),
    "deepseek2": Architecture("deepseek_v2", _deepseek),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, _POST_NORM),
    "glm4moe": Architecture("glm4_moe", _glm4_moe, _POST_NORM),
    "deepseek32": Architecture("deepseek_v32", _deepseek_v32),
    "glm-dsa": Architecture("glm_moe_dsa", _glm_moe_dsa),
    "dots1": Architecture("dots1", _dots1),
    "minimax-m2": Architecture("minimax_m2", _minimax_m2),
    "ernie4_5-moe": Architecture("ernie4_5_moe", _ernie4_5_moe),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", _hunyuan_v1_moe),
    "granitemoe": Architecture("granitemoe", _granitemoe, permuted=True),
    "exaone-moe": Architecture("exaone_moe", kinds.exaone_moe),
    "gemma4": Architecture("gemma4_text", kinds.gemma4, kinds.GEMMA4),
    "llama4": Architecture("llama4_text", kinds.llama4),
    "lfm2moe": Architecture("lfm2_moe", states.lfm2moe, states.LFM2MOE),
    "qwen3next": Architecture("qwen3_next", states.qwen3next, states.QWEN3NEXT),
    "qwen35moe": Architecture("qwen3_5_moe_text", states.qwen35moe, states.QWEN35MOE),
    "mimo2": Architecture("mimo_v2_flash", kinds.mimo_v2_flash),
    "phimoe": Architecture("phimoe", _phimoe),
}
