"""Tiny random Hugging Face folders of every family, written without torch.

All sizes of a family are pairwise different, so that a swapped axis cannot hide.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from moe_edge.convert.families import config_from_hf
from moe_edge.convert.rules import Piece, hf_shapes
from moe_edge.convert.safetensors_writer import SafetensorsWriter

_PLAIN = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 101,
    "max_position_embeddings": 160,
    "torch_dtype": "float32",
}
_MLA = {
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
# Grouped queries and DeepSeek-V3's choice of experts.
_V3 = {
    "num_key_value_heads": 2,
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "beta_fast": 32,
    "beta_slow": 1,
}
CONFIGS = {
    "olmoe": {
        **_PLAIN,
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "rope_theta": 9000.0,
        "rope_scaling": None,
        "clip_qkv": 1.5,
    },
    "mixtral": {
        **_PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 20,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "qwen2_moe": {
        **_PLAIN,
        "num_key_value_heads": 2,
        "intermediate_size": 28,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 36,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **_PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 28,
        "moe_intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "deepseek_v2": {
        **_PLAIN,
        **_MLA,
        "q_lora_rank": None,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "rope_theta": 10_000,
        "rope_scaling": _YARN,
    },
    "deepseek_v3": {
        **_PLAIN,
        **_MLA,
        "num_key_value_heads": 4,
        "q_lora_rank": 18,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {**_YARN, "rope_type": "yarn", "rope_theta": 1e4},
    },
    "gpt_oss": {
        **_PLAIN,
        "hidden_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
    },
    "deepseek": {
        **_PLAIN,
        "intermediate_size": 28,
        "moe_intermediate_size": 20,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "rope_theta": 1e4,
    },
    "xverse": {
        **_PLAIN,
        "intermediate_size": 20,
        "num_experts": 6,
        "num_shared_experts": 2,
        "moe_top_k": 3,
        "rope_theta": 5e5,
    },
    "glm4_moe": {
        **_PLAIN,
        **_V3,
        "head_dim": 12,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "rope_theta": 9000.0,
    },
    "glm4_moe_lite": {
        **_PLAIN,
        **_MLA,
        "num_key_value_heads": 4,
        "q_lora_rank": 18,
        "n_routed_experts": 6,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "first_k_dense_replace": None,  # the list says it
        "routed_scaling_factor": 1.7,
        "rope_theta": 9000.0,
    },
    "solar_open": {**_PLAIN, **_V3, "head_dim": 10},
    "dots1": {
        **_PLAIN,
        **_V3,
        "norm_topk_prob": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "rope_theta": 9000.0,
    },
    "minimax_m2": {
        **_PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rotary_dim": 6,
        "intermediate_size": 20,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_theta": 9000.0,
    },
    "ernie4_5_moe": {
        **_PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 28,
        "moe_intermediate_size": 20,
        "moe_num_experts": 6,
        "moe_num_shared_experts": 2,
        "moe_k": 3,
        "moe_layer_start_index": 1,
        "rope_theta": 9000.0,
    },
    "hunyuan_v1_moe": {
        **_PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "attention_bias": True,
        "intermediate_size": 20,
        "num_experts": 6,
        "moe_topk": 3,
        "rope_theta": 9000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 3.0, "factor": 1.0},
    },
}
CONFIGS["flex_olmo"] = {
    **_PLAIN,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "attention_bias": True,
    "pad_token_id": 0,  # that of the class is beyond this vocabulary
}
CONFIGS["granitemoe"] = {
    **_PLAIN,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
    "tie_word_embeddings": True,
}
CONFIGS["granitemoeshared"] = {
    **CONFIGS["granitemoe"],
    "shared_intermediate_size": 36,
    "tie_word_embeddings": False,
    "attention_bias": True,
}
CONFIGS["phimoe"] = {
    **_PLAIN,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.2,
    "attention_bias": True,
    "lm_head_bias": True,
    "rope_theta": 1e4,
}
CONFIGS["mimo_v2_flash"] = {
    **_PLAIN,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "v_head_dim": 10,
    "attention_value_scale": 0.6,
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 11,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta}
        | {"partial_rotary_factor": 0.44}
        for kind, theta in (("full_attention", 9e3), ("sliding_attention", 7e2))
    },
}
CONFIGS["deepseek_v32"] = {
    **_PLAIN,
    **_MLA,
    "num_key_value_heads": 4,
    "q_lora_rank": 18,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "index_topk": 320,
    "index_n_heads": 3,
    "index_head_dim": 12,
    "rope_parameters": {**_YARN, "rope_type": "yarn", "rope_theta": 1e4},
}
CONFIGS["glm_moe_dsa"] = {
    **CONFIGS["deepseek_v32"],
    "n_group": 1,
    "topk_group": 1,
    "indexer_types": ["full", "full", "shared"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e3},
}
CONFIGS["exaone_moe"] = {
    **_PLAIN,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 9000.0,
}
CONFIGS["llama4_text"] = {
    **_PLAIN,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 20,
    "intermediate_size_mlp": 28,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0, 1, 1],
    "attention_chunk_size": 24,
    "floor_scale": 11,
    "attn_scale": 0.3,
    "attention_bias": True,
    "pad_token_id": 0,
}
CONFIGS["gemma4_text"] = {
    **_PLAIN,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "top_k_experts": 3,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e2},
        "full_attention": {"rope_type": "proportional", "rope_theta": 9e3}
        | {"partial_rotary_factor": 0.5},
    },
}
CONFIGS["lfm2_moe"] = {
    **_PLAIN,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.7,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "rope_theta": 9000.0,
}
CONFIGS["qwen3_next"] = {
    **_PLAIN,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 44,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 36,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [0],
    "rope_theta": 9000.0,
}
CONFIGS["qwen3_5_moe_text"] = {
    **CONFIGS["qwen3_next"],
    "intermediate_size": None,
    "mlp_only_layers": None,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 9000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
FAMILIES = tuple(CONFIGS)
REMOTE_CODE = ("deepseek", "xverse")  # transformers lacks them
# One family of each kind of experts and their choice: what is refactored and profiled.
_SAME_EXPERTS = {"glm4_moe", "glm4_moe_lite", "solar_open", "dots1", "hunyuan_v1_moe"}
_SAME_EXPERTS |= {
    "flex_olmo",
    "granitemoe",
    "deepseek_v32",
    "glm_moe_dsa",
    "exaone_moe",
}
_SAME_EXPERTS |= {"mimo_v2_flash", "llama4_text"}  # one a token: never refactored
_SAME_EXPERTS |= {"lfm2_moe", "qwen3_next", "qwen3_5_moe_text"}
KINDS_OF_EXPERTS = tuple(family for family in FAMILIES if family not in _SAME_EXPERTS)
_TORCH_NAMES = {"float32": np.float32, "float16": np.float16}


def raw_config(family: str, **changes) -> dict:
    """The config.json of a family as a dict; a change to None stays as null."""
    return {"model_type": family, **CONFIGS[family], **changes}


def random_tensors(raw: dict, dtype: str = "float32", seed: int = 0) -> dict:
    """HF name -> random array for a config."""
    rng = np.random.default_rng(seed)
    numpy_dtype = _TORCH_NAMES.get(dtype, ml_dtypes.bfloat16)
    return {
        name: rng.standard_normal(shape, np.float32).astype(numpy_dtype)
        for name, shape in hf_shapes(config_from_hf(raw)).items()
    }


def write_tensors(folder: Path, tensors: dict, shard_bytes: int = 1 << 40) -> None:
    """Writes safetensors files (and an index if there are several)."""
    shapes = {name: array.shape for name, array in tensors.items()}
    dtypes = {name: array.dtype for name, array in tensors.items()}
    writer = SafetensorsWriter(folder, shapes, dtypes, shard_bytes)
    for name, array in tensors.items():
        writer.write(Piece(name, 0, np.ascontiguousarray(array)))
    writer.close()


def write_folder(
    folder: Path,
    raw: dict,
    tensors: dict | None = None,
    *,
    shard_bytes: int = 1 << 40,
) -> Path:
    """An HF folder of `raw`, with random tensors unless they are given."""
    folder.mkdir(parents=True, exist_ok=True)
    # Odd spacing: the file must survive byte for byte.
    (folder / "config.json").write_text(json.dumps(raw, indent=3))
    dtype = raw.get("torch_dtype", "float32")
    write_tensors(folder, tensors or random_tensors(raw, dtype), shard_bytes)
    return folder


def hf_folder(folder: Path, family: str, **changes) -> Path:
    """A random HF folder of a family, with changes to its config."""
    return write_folder(folder, raw_config(family, **changes))
