"""GGUF files of families whose layers keep states: metadata, and what was changed.

llama.cpp's converter stores -exp(A_log); one more than the weights of norms, but for
the delta-net's; convolutions without the axis of length one; Qwen3-Next's packed
products by kind, q | k | v and z; and Qwen3.5's value heads in the order in which ggml
repeats key heads: the first of each key head, then the second, ...
"""

from typing import Any

import numpy as np

from moe_edge.convert import gguf_parts as parts
from moe_edge.convert.gguf_metadata import Metadata
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import BLOCK
from moe_edge.model.state_config import DeltaConfig


def lfm2moe(meta: Metadata) -> dict[str, Any]:
    """Layers without key/value heads have a convolution."""
    parts.only_router(meta, parts.SIGMOID, norm=True)
    kv_heads = meta.need_each_layer("attention.head_count_kv")
    own = {heads for heads in kv_heads if heads}
    if len(own) != 1:
        raise meta.bad("attention.head_count_kv", kv_heads, "one number besides 0")
    head_dim = meta.even_head
    for key in ("attention.key_length", "attention.value_length"):
        meta.only(key, head_dim)
    meta.only("rope.dimension_count", head_dim)
    return {
        "num_key_value_heads": own.pop(),
        "rope_parameters": parts.rope(meta),
        "layer_types": ["full_attention" if each else "conv" for each in kv_heads],
        "conv_L_cache": meta.need("shortconv.l_cache"),
        "norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "num_dense_layers": meta.get("leading_dense_block_count", 0),
    }


LFM2MOE = {
    "final_norm": "token_embd_norm.weight",
    "attn.in_proj": "shortconv.in_proj.weight",
    "attn.conv": "shortconv.conv.weight",
    "attn.out_proj": "shortconv.out_proj.weight",
}


def qwen3next(meta: Metadata) -> dict[str, Any]:
    return _hybrid(meta) | {"mlp_only_layers": parts.dense_layers(meta)}


def qwen35moe(meta: Metadata) -> dict[str, Any]:
    meta.raw("rope.dimension_sections")  # of images: alike for text
    return _hybrid(meta)


def _hybrid(meta: Metadata) -> dict[str, Any]:
    parts.only_router(meta, parts.SOFTMAX, norm=True)
    heads = meta.integer("ssm.time_step_rank")
    width = meta.integer("ssm.inner_size")
    if not heads or width % heads:
        raise meta.bad("ssm.inner_size", width, f"a multiple of {heads} value heads")
    return parts.gqa(meta, rotated="partial_rotary_factor") | {
        "full_attention_interval": meta.get("full_attention_interval", 4),
        "linear_num_key_heads": meta.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": meta.need("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_conv_kernel_dim": meta.need("ssm.conv_kernel"),
        "shared_expert_intermediate_size": meta.need(
            "expert_shared_feed_forward_length"
        ),
    }


_DELTA = {
    "mlp_norm": "post_attention_norm.weight",
    "attn.conv": "ssm_conv1d.weight",
    "attn.dt_bias": "ssm_dt.bias",
    "attn.a_log": "ssm_a",
    "attn.norm": "ssm_norm.weight",
    "attn.out_proj": "ssm_out.weight",
}
QWEN3NEXT = {
    **_DELTA,
    "attn.in_qkvz": "attn_qkv.weight",  # and GATE
    "attn.in_ba": "ssm_ba.weight",
}
QWEN35MOE = {
    **_DELTA,
    "attn.in_qkv": "attn_qkv.weight",
    "attn.in_z": "attn_gate.weight",
    "attn.in_b": "ssm_beta.weight",
    "attn.in_a": "ssm_alpha.weight",
}
GATE = "attn_gate.weight"
_NORMS = ("final_norm", "attn_norm", "mlp_norm", "attn.q_norm", "attn.k_norm")


def restored(config: ModelConfig, name: str, arrays: list[np.ndarray]) -> np.ndarray:
    """A parameter as Hugging Face stores it, from its parts in the file.

    Args:
      arrays: of numbers, or rows of whole blocks (not where `parts_blocks`).
    """
    array = arrays[0]
    if config.norm_plus_one and name in _NORMS:
        return array - array.dtype.type(1)
    kinds = [each for each in config.other_attention if isinstance(each, DeltaConfig)]
    if kinds:
        array = _of_delta(kinds[0], name, arrays)
    return array[:, None] if name == "attn.conv" else array


def parts_blocks(config: ModelConfig, name: str) -> bool:
    """Whether `restored` moves columns of a matrix of which a block holds several."""
    return name == "attn.out_proj" and any(
        isinstance(each, DeltaConfig)
        and _has_other_order(each)
        and each.value_dim % BLOCK > 0
        for each in config.other_attention
    )


def _has_other_order(delta: DeltaConfig) -> bool:
    return not delta.grouped and delta.value_heads != delta.key_heads


def _of_delta(delta: DeltaConfig, name: str, arrays: list[np.ndarray]) -> np.ndarray:
    array = arrays[0]
    if name == "attn.a_log":
        array = np.log(-array)
    if name == "attn.in_qkvz":
        return _by_key_head(delta, *arrays)
    if not _has_other_order(delta):
        return array
    keys = 2 * delta.key_heads * delta.key_dim
    if name in ("attn.in_qkv", "attn.conv"):
        return np.concatenate([array[:keys], _ordered(delta, array[keys:])])
    if name == "attn.out_proj":
        return _ordered(delta, array.T).T
    if name in ("attn.in_z", "attn.in_b", "attn.in_a", "attn.a_log", "attn.dt_bias"):
        return _ordered(delta, array)
    return array


def _ordered(delta: DeltaConfig, rows: np.ndarray) -> np.ndarray:
    """Rows of value heads, those of a key head together."""
    each = delta.value_heads // delta.key_heads
    heads = rows.reshape(each, delta.key_heads, -1, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


def _by_key_head(delta: DeltaConfig, qkv: np.ndarray, z: np.ndarray) -> np.ndarray:
    """q, k, v and z of the first key head, then of the second, ..."""
    keys = delta.key_heads * delta.key_dim
    four = (*np.split(qkv, [keys, 2 * keys]), z)
    heads = [each.reshape(delta.key_heads, -1, each.shape[-1]) for each in four]
    return np.concatenate(heads, axis=1).reshape(-1, qkv.shape[-1])
