"""GGUF metadata of families whose layers differ: windows, heads, rotary or none.

Each function returns fields of config.json for `gguf_families.py`.
"""

from typing import Any

from moe_edge.convert import gguf_parts as parts
from moe_edge.convert.gguf_metadata import Metadata


def exaone_moe(meta: Metadata) -> dict[str, Any]:
    """Rotary in sliding layers only, which the family's model says itself."""
    slides = meta.each_layer("attention.sliding_window_pattern")
    if slides is None:
        slides = [(layer + 1) % 4 for layer in range(meta.layers)]
    return (
        parts.gqa(meta)
        | parts.router_v3(meta)
        | {
            "layer_types": parts.layer_types(slides),
            "sliding_window": meta.need("attention.sliding_window"),
            "num_shared_experts": meta.need("expert_shared_count"),
            "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        }
    )


def mimo_v2_flash(meta: Metadata) -> dict[str, Any]:
    """Sliding layers have other key/value heads and theta.

    Files count the latest positions besides a token's own, as published configs do.
    """
    slides = meta.need_each_layer("attention.sliding_window_pattern")
    kv_heads = meta.need_each_layer("attention.head_count_kv")
    head_dim = meta.integer("attention.key_length")
    rotated = meta.integer("rope.dimension_count", head_dim)
    ropes = {
        "full_attention": parts.rope(meta),
        "sliding_attention": {"rope_theta": meta.get("rope.freq_base_swa", 10_000.0)},
    }
    for rope in ropes.values():
        rope["partial_rotary_factor"] = parts.share(rotated, head_dim)
    found = {
        "layer_types": parts.layer_types(slides),
        "sliding_window_size": meta.need("attention.sliding_window"),
        "head_dim": head_dim,
        "v_head_dim": meta.need("attention.value_length"),
        "attention_value_scale": meta.get("attention.value_scale", 1.0),
        "attention_bias": parts.has_bias(meta),
        "rope_parameters": ropes,
        "mlp_layer_types": parts.mlp_layer_types(meta),
    }
    for name, kind in (("num_key_value_heads", 0), ("swa_num_key_value_heads", 1)):
        own = {n for n, each in zip(kv_heads, slides, strict=True) if each == kind}
        if len(own) > 1:
            raise meta.bad("attention.head_count_kv", kv_heads, "two kinds of layers")
        found |= {name: own.pop()} if own else {}
    norm = {"norm_topk_prob": meta.get("expert_weights_norm", True)}
    return found | parts.router_v3(meta) | norm


def llama4(meta: Metadata) -> dict[str, Any]:
    """What a file cannot say is as in the published models.

    A window of 0 means that all layers are alike: rotary, and no chunks.
    """
    parts.only_router(meta, parts.SIGMOID)
    layers = meta.layers
    is_chunked = meta.get("attention.sliding_window") != 0
    dense = parts.dense_layers(meta)
    return parts.gqa(meta) | {
        "use_qk_norm": meta.need("expert_count") != 128,
        "intermediate_size_mlp": meta.need("feed_forward_length"),
        "interleave_moe_layer_step": meta.need("interleave_moe_layer_step"),
        "moe_layers": [layer for layer in range(layers) if layer not in dense],
        "no_rope_layers": [
            int(not is_chunked or (layer + 1) % 4 != 0) for layer in range(layers)
        ],
        "attention_chunk_size": 8192 if is_chunked else None,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def gemma4(meta: Metadata) -> dict[str, Any]:
    """Full layers have sizes of their own, and may have no v besides k."""
    parts.only_router(meta, parts.SOFTMAX, norm=True)
    slides = meta.need_each_layer("attention.sliding_window_pattern")
    kv_heads = meta.need_each_layer("attention.head_count_kv")
    width = meta.integer("attention.key_length")
    sliding_width = meta.integer("attention.key_length_swa")
    for ending, own in (("", width), ("_swa", sliding_width)):
        meta.only(f"attention.value_length{ending}", own)
        meta.only(f"rope.dimension_count{ending}", own)
    whole = [layer for layer in range(meta.layers) if not slides[layer]]
    ropes = {
        "full_attention": {
            **parts.rope(meta),
            "rope_type": "proportional",
            "partial_rotary_factor": parts.turning_share(meta, width),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": meta.get("rope.freq_base_swa", 10_000.0),
        },
    }
    sliding_heads = {n for n, each in zip(kv_heads, slides, strict=True) if each}
    if len(sliding_heads) > 1:
        raise meta.bad("attention.head_count_kv", kv_heads, "one in sliding layers")
    return {
        "layer_types": parts.layer_types(slides),
        "sliding_window": meta.need("attention.sliding_window"),
        "head_dim": sliding_width,
        "num_key_value_heads": max(sliding_heads, default=1),
        "per_layer_config": {
            str(layer): {"head_dim": width, "num_key_value_heads": kv_heads[layer]}
            for layer in whole
        },
        "attention_k_eq_v": not any(
            f"blk.{layer}.attn_{name}.weight" in meta.tensors
            for layer in whole
            for name in ("v", "qkv")
        ),
        "attention_bias": parts.has_bias(meta),
        "rope_parameters": ropes,
        "enable_moe_block": True,
        "final_logit_softcapping": meta.get("final_logit_softcapping") or None,
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": meta.get("attention.shared_kv_layers", 0),
    }


GEMMA4 = {
    "attn_after_norm": "post_attention_norm.weight",
    "mlp_after_norm": "post_ffw_norm.weight",
    "expert_norm": "pre_ffw_norm_2.weight",
    "expert_after_norm": "post_ffw_norm_2.weight",
    "shared_after_norm": "post_ffw_norm_1.weight",
    "layer_scale": "layer_output_scale.weight",
    "router.input_scale": "ffn_gate_inp.scale",
    "router.expert_scale": "ffn_down_exps.scale",
    **{f"shared.{name}": f"ffn_{name}.weight" for name in ("gate", "up", "down")},
}
