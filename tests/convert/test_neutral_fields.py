"""Fields that a family does not read: accepted with the value that changes nothing."""

import pytest

from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import ConfigError
from tests.support.tiny_checkpoints import FAMILIES, raw_config

NO_WINDOW = [f for f in FAMILIES if f not in ("mixtral", "gpt_oss")]
EVERYWHERE = {
    "attn_pdrop": 0.0,
    "hidden_dropout": 0.1,
    "embedding_dropout_prob": 0.0,
    "logit_scale": 1,
    "rotary_pct": 1,
    "use_mrope": False,
    "decoder_sparse_step_of_no_one": None,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_change_nothing_are_accepted(family):
    raw = raw_config(family)
    config = config_from_hf(raw)
    attention, moe = config.attention, config.moe
    neutral = {
        **EVERYWHERE,
        "head_dim": attention.head_dim,
        "lm_head_bias": config.head_bias,
        "logits_scaling": config.logit_divisor,
        "mlp_bias": moe.expert_bias,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "partial_rotary_factor": 1.0
        if attention.kind == "mla"
        else attention.rope.dim / attention.head_dim,
        "qkv_bias": attention.qkv_bias,
        "rope_interleave": attention.rope.interleaved,
        "routed_scaling_factor": moe.routed_scaling,
        "scoring_func": moe.scoring.removesuffix("_topk"),
        "shared_expert_intermediate_size": moe.shared_dim,
        "use_qk_norm": attention.qk_norm != "none",
        "use_sliding_window": bool(attention.windows),
    }
    assert config_from_hf(raw | neutral) == config


@pytest.mark.parametrize(
    "family, neutral",
    [
        ("olmoe", {"use_qk_norm": True, "qkv_bias": False}),
        ("olmoe", {"attention_bias": True, "qkv_bias": True}),
        ("qwen3_moe", {"use_qk_norm": True, "shared_expert_intermediate_size": 0}),
        ("qwen3_moe", {"n_shared_experts": 0, "first_k_dense_replace": None}),
        ("mixtral", {"moe_layer_freq": 1, "norm_topk_prob": True, "mlp_bias": False}),
        ("mixtral", {"layer_types": ["sliding_attention"] * 3}),
        ("mixtral", {"first_k_dense_replace": 0, "mlp_only_layers": []}),
        ("olmoe", {"moe_layer_freq": [1, 1, 1], "decoder_sparse_step": 1}),
        ("olmoe", {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
        ("olmoe", {"num_nextn_predict_layers": 0, "intermediate_size": 20.0}),
        ("deepseek_v2", {"moe_layer_freq": 1, "attention_bias": False}),
        ("deepseek_v3", {"moe_layer_freq": [0, 1, 1], "use_bias": False}),
        ("deepseek", {"layer_types": ["full_attention"] * 3, "max_window_layers": 2}),
        ("xverse", {"attention_bias": False, "moe_intermediate_size": 20}),
        ("gpt_oss", {"use_bias": True, "norm_topk_prob": True}),
        ("olmoe", {"sliding_window": 4096}),  # longer than the context
        ("olmoe", {"sliding_window": 9, "use_sliding_window": False}),
    ],
)
def test_what_the_family_does_anyway_is_accepted(family, neutral):
    raw = raw_config(family)
    raw = raw | {"attention_bias": True} if neutral.get("attention_bias") else raw
    expected = config_from_hf(raw)
    assert config_from_hf(raw | neutral) == expected


@pytest.mark.parametrize(
    "family, field, value, expected",
    [
        ("olmoe", "qkv_bias", True, "false"),
        ("olmoe", "use_qk_norm", False, "true"),
        ("olmoe", "mlp_bias", True, "false"),
        ("olmoe", "shared_expert_intermediate_size", 36, "0"),
        ("olmoe", "use_mrope", True, "false"),
        ("olmoe", "routed_scaling_factor", 2.5, "1.0"),
        ("olmoe", "logit_scale", 0.5, "1"),
        ("olmoe", "n_group", 2, "1"),
        ("olmoe", "moe_layer_freq", 2, "1"),
        ("olmoe", "moe_layer_freq", True, "1"),
        ("olmoe", "num_nextn_predict_layers", 1, "0"),
        ("olmoe", "sliding_window", 159, "null"),
        ("olmoe", "use_sliding_window", True, "false"),
        ("olmoe", "layer_types", ["sliding_attention"] * 3, '\\["full_attention'),
        ("mixtral", "norm_topk_prob", False, "true"),
        ("mixtral", "attention_bias", True, "false"),
        ("mixtral", "first_k_dense_replace", 1, "0"),
        ("mixtral", "use_sliding_window", False, "true"),
        ("qwen2_moe", "attention_bias", False, "null"),
        ("qwen2_moe", "use_qk_norm", True, "false"),
        ("qwen3_moe", "qkv_bias", True, "false"),
        ("gpt_oss", "use_bias", False, "true"),
        ("deepseek_v2", "mlp_bias", True, "false"),
        ("deepseek_v2", "use_qk_norm", True, "false"),
        ("deepseek_v3", "scoring_func", "softmax", '"sigmoid"'),
        ("deepseek_v3", "moe_layer_freq", [1, 1, 1], "1"),
        ("xverse", "moe_intermediate_size", 19, "20"),
    ],
)
def test_values_that_change_the_maths_are_refused(family, field, value, expected):
    raw = raw_config(family, **{field: value})
    message = f"{family}: {field} is .*, expected {expected}"
    with pytest.raises(ConfigError, match=message):
        config_from_hf(raw)
