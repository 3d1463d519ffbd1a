"""What llama.cpp's converter says of a config.json, by family.

Source: the folder `conversion` of github.com/ggml-org/llama.cpp, as of 2026.
"""

ARCHS = {
    "olmoe": "olmoe",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "solar_open": "glm4moe",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "exaone_moe": "exaone-moe",
    "phimoe": "phimoe",
    "mimo_v2_flash": "mimo2",
    "llama4_text": "llama4",
    "gemma4_text": "gemma4",
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
}
_SOFTMAX, _SIGMOID = 1, 2
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def _first(raw: dict, names):
    return next((raw[name] for name in names if raw.get(name) is not None), None)


def experts(raw: dict) -> int:
    return _first(raw, _EXPERTS)


def metadata(raw: dict, old: bool = False) -> dict:
    """The metadata of a model.

    Args:
      old: DeepSeek as converters wrote it before 2025.
    """
    family = raw["model_type"]
    arch = ARCHS[family]
    said = _common(raw)
    if "kv_lora_rank" in raw:
        said |= _mla(raw, old)
    elif family in _OWN:
        said |= _OWN[family](raw)
    own = {f"{arch}.{key}": v for key, v in said.items() if v is not None}
    return {"general.architecture": arch, "general.name": "tiny"} | own


def _rope(raw: dict) -> dict:
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _head_dim(raw: dict) -> int:
    return raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]


def _common(raw: dict) -> dict:
    heads, rope = raw["num_attention_heads"], _rope(raw)
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    said = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": raw.get("num_key_value_heads", heads),
        "attention.layer_norm_rms_epsilon": raw.get(
            "rms_norm_eps", raw.get("norm_eps")
        ),
        "attention.key_length": raw.get("head_dim"),
        "attention.value_length": raw.get("head_dim"),
        "rope.freq_base": None if theta is None else float(theta),
        "expert_count": experts(raw),
        "expert_used_count": _first(raw, _CHOSEN),
        "expert_group_count": raw.get("n_group"),
        "expert_group_used_count": raw.get("topk_group"),
        "expert_feed_forward_length": raw.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": raw.get("shared_expert_intermediate_size"),
        "attention.clamp_kqv": raw.get("clip_qkv"),
        "attention.sliding_window": raw.get("sliding_window"),
    }
    if raw["model_type"] in ("gpt_oss", "minimax_m2"):
        said["expert_feed_forward_length"] = raw["intermediate_size"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "dynamic"):
        original = rope.get("original_max_position_embeddings")
        said |= {
            "rope.scaling.type": kind,
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": original,
        }
    return said


def _router(raw: dict, scoring: int | None) -> dict:
    return {
        "leading_dense_block_count": raw.get("first_k_dense_replace"),
        "expert_shared_count": raw["n_shared_experts"],
        "expert_weights_scale": raw.get("routed_scaling_factor"),
        "expert_weights_norm": raw.get("norm_topk_prob", False),
        "expert_gating_func": scoring,
    }


def _mla(raw: dict, old: bool) -> dict:
    head = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
    rank, value = raw["kv_lora_rank"], raw["v_head_dim"]
    scoring = dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _SIGMOID)
    scoring["deepseek_v2"] = _SOFTMAX
    said = _router(raw, scoring.get(raw["model_type"])) | {
        "attention.q_lora_rank": raw["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": raw["qk_rope_head_dim"],
        "attention.indexer.head_count": raw.get("index_n_heads"),
        "attention.indexer.key_length": raw.get("index_head_dim"),
        "attention.indexer.top_k": raw.get("index_topk"),
    }
    if "indexer_types" in raw:
        full = [each == "full" for each in raw["indexer_types"]]
        said["attention.indexer.types"] = full
    if "mscale_all_dim" in _rope(raw):
        said["rope.scaling.yarn_log_multiplier"] = 0.1 * _rope(raw)["mscale_all_dim"]
    if old:
        return said | {"attention.key_length": head, "attention.value_length": value}
    return said | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + raw["qk_rope_head_dim"],
        "attention.value_length": rank,
        "attention.key_length_mla": head,
        "attention.value_length_mla": value,
    }


def _glm4_moe(raw: dict) -> dict:
    share = _rope(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    return _router(raw, _SIGMOID) | {
        "rope.dimension_count": int(_head_dim(raw) * share)
    }


def _minimax_m2(raw: dict) -> dict:
    return {"rope.dimension_count": raw["rotary_dim"], "expert_gating_func": _SIGMOID}


def _ernie4_5_moe(raw: dict) -> dict:
    return {
        "interleave_moe_layer_step": raw["moe_layer_interval"],
        "leading_dense_block_count": raw["moe_layer_start_index"],
        "expert_shared_count": raw["moe_num_shared_experts"],
        # As the converter computes it, by coincidence right for the published model.
        "expert_shared_feed_forward_length": raw["intermediate_size"]
        // raw["num_key_value_heads"],
    }


def _hunyuan_v1_moe(raw: dict) -> dict:
    said = {
        "expert_shared_feed_forward_length": raw["intermediate_size"],
        "expert_feed_forward_length": raw["intermediate_size"],
        "expert_shared_count": 1,
    }
    if _rope(raw).get("alpha"):
        dim = _head_dim(raw)
        theta = raw["rope_theta"] * _rope(raw)["alpha"] ** (dim / (dim - 2))
        said |= {
            "rope.freq_base": float(theta),
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 262_144,
        }
    return said


def _granitemoe(raw: dict) -> dict:
    return {
        "attention.scale": raw["attention_multiplier"],
        "embedding_scale": raw["embedding_multiplier"],
        "residual_scale": raw["residual_multiplier"],
        "logit_scale": raw["logits_scaling"],
        "expert_shared_feed_forward_length": raw.get("shared_intermediate_size"),
        "rope.dimension_count": _head_dim(raw),
    }


def _exaone_moe(raw: dict) -> dict:
    router = _router(raw | {"n_shared_experts": raw["num_shared_experts"]}, _SIGMOID)
    slides = [each == "sliding_attention" for each in raw["layer_types"]]
    width = raw["moe_intermediate_size"] * raw["num_shared_experts"]
    return router | {
        "attention.sliding_window_pattern": slides,
        "expert_shared_feed_forward_length": width,
        "rope.scaling.type": "none",
        "nextn_predict_layers": 0,
    }


def _mimo_v2_flash(raw: dict) -> dict:
    slides = [int(each == "sliding_attention") for each in raw["layer_types"]]
    heads, ropes = raw["num_key_value_heads"], raw["rope_parameters"]
    full = ropes["full_attention"]
    return {
        "attention.sliding_window_pattern": slides,
        "attention.head_count_kv": [heads * (1 + each) for each in slides],
        "attention.sliding_window": raw["sliding_window"] - 1,  # as published configs
        "attention.value_length": raw["v_head_dim"],
        "attention.value_scale": raw["attention_value_scale"],
        "rope.dimension_count": int(raw["head_dim"] * full["partial_rotary_factor"]),
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        "expert_gating_func": _SIGMOID,
        "expert_group_count": raw.get("n_group"),
    }


def _llama4_text(raw: dict) -> dict:
    return {
        "feed_forward_length": raw["intermediate_size_mlp"],
        "expert_feed_forward_length": raw["intermediate_size"],
        "interleave_moe_layer_step": raw["interleave_moe_layer_step"],
        "rope.dimension_count": _head_dim(raw),
    }


def _gemma4_text(raw: dict) -> dict:
    slides = [each == "sliding_attention" for each in raw["layer_types"]]
    heads = (raw["num_global_key_value_heads"], raw["num_key_value_heads"])
    width, ropes = raw["global_head_dim"], raw["rope_parameters"]
    return {
        "attention.sliding_window_pattern": slides,
        "attention.head_count_kv": [heads[each] for each in slides],
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.key_length_swa": raw["head_dim"],
        "attention.value_length_swa": raw["head_dim"],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": width,
        "rope.dimension_count_swa": raw["head_dim"],
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": raw["final_logit_softcapping"],
    }


def _deepseek(raw: dict) -> dict:
    return {
        "leading_dense_block_count": raw["first_k_dense_replace"],
        "expert_shared_count": raw["n_shared_experts"],
        "expert_weights_scale": 1.0,
        "rope.dimension_count": _head_dim(raw),
        "rope.scaling.type": "none",
    }


def _lfm2_moe(raw: dict) -> dict:
    full = [each == "full_attention" for each in raw["layer_types"]]
    return {
        "attention.head_count_kv": [raw["num_key_value_heads"] * each for each in full],
        "shortconv.l_cache": raw["conv_L_cache"],
        "leading_dense_block_count": raw["num_dense_layers"],
        "expert_gating_func": _SIGMOID,
    }


def _qwen3_next(raw: dict) -> dict:
    share = _rope(raw).get("partial_rotary_factor", 0.25)
    values = raw["linear_num_value_heads"] * raw["linear_value_head_dim"]
    return {
        "ssm.conv_kernel": raw["linear_conv_kernel_dim"],
        "ssm.state_size": raw["linear_key_head_dim"],
        "ssm.group_count": raw["linear_num_key_heads"],
        "ssm.time_step_rank": raw["linear_num_value_heads"],
        "ssm.inner_size": values,
        "full_attention_interval": raw.get("full_attention_interval", 4),
        "rope.dimension_count": int(_head_dim(raw) * share),
    }


_OWN = {
    "lfm2_moe": _lfm2_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe_text": lambda raw: (
        _qwen3_next(raw) | {"rope.dimension_sections": [11, 11, 10, 0]}
    ),
    "deepseek": _deepseek,
    "glm4_moe": _glm4_moe,
    "solar_open": _glm4_moe,
    "dots1": lambda raw: _router(raw, _SIGMOID),
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "exaone_moe": _exaone_moe,
    "mimo_v2_flash": _mimo_v2_flash,
    "llama4_text": _llama4_text,
    "gemma4_text": _gemma4_text,
    "phimoe": lambda raw: {"rope.dimension_count": _head_dim(raw)},
}
