"""config.json of every family, both dialects, and what must be refused."""

import math

import pytest

from moe_edge.convert.families import RECURRENT, config_from_hf
from moe_edge.core.checks import ConfigError
from tests.support.tiny_checkpoints import CONFIGS, raw_config

# As published (fields that matter), older dialect.
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def test_config_deepseek_v2_lite_matches_published_sizes():
    config = config_from_hf(DEEPSEEK_V2_LITE)
    assert (config.num_layers, len(config.moe_layers)) == (27, 26)
    assert config.attention.head_dim == 192
    assert config.attention.q_lora_rank is None
    assert config.attention.rope.interleaved
    assert config.attention.rope.attention_factor == 1.0
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert config.attention.scale == pytest.approx(192**-0.5 * mscale**2)
    assert (config.moe.num_groups, config.moe.shared_dim) == (1, 2816)
    assert config.eos_ids == (100001,)


def test_config_gpt_oss_20b_matches_published_sizes():
    config = config_from_hf(GPT_OSS_20B)
    assert config.window(0) == 128 and config.window(1) is None
    rope = config.attention.rope
    assert (rope.kind, rope.truncate, rope.theta) == ("yarn", False, 150000.0)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert (config.moe.num_experts, config.moe.top_k) == (32, 4)
    assert config.moe.expert_bias and config.attention.sinks


def has_rope_by_type(family: str) -> bool:
    return "full_attention" in (CONFIGS[family].get("rope_parameters") or {})


@pytest.mark.parametrize("family", [f for f in CONFIGS if not has_rope_by_type(f)])
def test_config_both_dialects_agree(family):
    raw = raw_config(family)
    raw.pop("rope_parameters", None)
    raw.pop("rope_scaling", None)
    raw.pop("rope_theta", None)
    kind = "longrope" if family == "phimoe" else "yarn"
    scaling = {"factor": 4.0, "original_max_position_embeddings": 40}
    if kind == "longrope":
        scaling |= {"short_factor": [1.5] * 6, "long_factor": [3] * 6}
        scaling |= {"short_mscale": 1.1, "long_mscale": 1.2}
    old = raw | {"rope_theta": 7000.0, "rope_scaling": {"type": kind, **scaling}}
    new = raw | {"rope_parameters": {"rope_theta": 7000.0, "rope_type": kind} | scaling}
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(old).attention.rope.theta == 7000.0


def test_config_rope_theta_default_depends_on_family():
    for family, theta in (("mixtral", 1e6), ("gpt_oss", 150000.0), ("olmoe", 1e4)):
        raw = raw_config(family)
        for name in ("rope_theta", "rope_parameters", "rope_scaling"):
            raw.pop(name, None)
        assert config_from_hf(raw).attention.rope.theta == theta


def test_config_reads_router_jitter_noise_where_it_changes_the_choice():
    assert config_from_hf(raw_config("phimoe")).moe.nearness == 0.2
    for family in ("phimoe", "mixtral"):
        raw = raw_config(family, router_jitter_noise=0.4)
        changed = config_from_hf(raw) != config_from_hf(raw_config(family))
        assert changed == (family == "phimoe")


def test_config_ends_the_context_where_longrope_changes():
    rope = {"type": "longrope", "short_factor": [1.5] * 6, "long_factor": [3.0] * 6}
    rope |= {"short_mscale": 1.1, "long_mscale": 1.2}
    raw = raw_config("phimoe", rope_scaling=rope, original_max_position_embeddings=80)
    config = config_from_hf(raw)
    assert (config.max_positions, config.attention.rope.attention_factor) == (80, 1.1)
    assert config.context_words == (
        "80 (beyond, longrope rotates all positions by other frequencies, which is not "
        "implemented)"
    )
    raw["max_position_embeddings"] = 80
    assert config_from_hf(raw).context_words == "80"
    # Whichever layers have it, also behind those without rotary.
    rope = {"type": "longrope", "short_factor": [1.5] * 5, "long_factor": [3.0] * 5}
    rope["original_max_position_embeddings"] = 80
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    changes = {"rope_scaling": rope, "layer_types": types}
    config = config_from_hf(raw_config("exaone_moe", **changes))
    assert config.attention.rope is None and config.max_positions == 80
    with pytest.raises(ConfigError, match="type is 'yarn', expected 'default' or"):
        config_from_hf(raw | {"rope_scaling": {"type": "yarn", "factor": 4.0}})


def test_config_kimi_k2_equals_deepseek_v3():
    raw = raw_config("deepseek_v3")
    kimi = config_from_hf(raw | {"model_type": "kimi_k2"})
    assert kimi.moe == config_from_hf(raw).moe
    assert kimi.moe.scoring == "sigmoid" and kimi.moe.correction_bias


def test_config_qwen2_moe_windows_follow_layer_types():
    raw = raw_config("qwen2_moe", use_sliding_window=True, sliding_window=7)
    assert config_from_hf(raw).attention.windows == (7, None, 7)
    raw |= {"max_window_layers": 1}
    assert config_from_hf(raw).attention.windows == (7, None, None)
    raw |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    assert config_from_hf(raw).attention.windows == (None, 7, None)


def test_config_dense_layers_follow_step_and_list():
    assert config_from_hf(raw_config("qwen3_moe")).moe_layers == (1,)
    assert config_from_hf(raw_config("qwen2_moe")).moe_layers == (0, 2)
    raw = raw_config("deepseek", moe_layer_freq=2, first_k_dense_replace=0)
    assert config_from_hf(raw).moe_layers == (0, 2)


def test_config_generation_file_overrides_stop_ids():
    raw = raw_config("mixtral", eos_token_id=3)
    assert config_from_hf(raw).eos_ids == (3,)
    assert config_from_hf(raw, {"eos_token_id": [5, 6]}).eos_ids == (5, 6)


def test_config_rejects_unknown_model_type_and_lists_known():
    with pytest.raises(ConfigError, match="unknown model_type 'llama'.*olmoe.*xverse"):
        config_from_hf({"model_type": "llama"})
    for odd in ([], {"a": 1}, None, 3):
        with pytest.raises(ConfigError, match="unknown model_type .*known: .*olmoe"):
            config_from_hf({"model_type": odd})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("olmoe", "attn_logit_softcapping", 50.0),
        ("olmoe", "sliding_window", 128),
        ("olmoe", "hidden_act", "relu"),
        ("olmoe", "head_dim", 10),
        ("olmoe", "partial_rotary_factor", 0.5),
        ("olmoe", "is_causal", False),
        ("mixtral", "rms_norm_eps", "tiny"),
        ("mixtral", "num_hidden_layers", 10**12),
        ("mixtral", "num_local_experts", True),
        ("qwen2_moe", "layer_types", ["sliding_attention"] * 3),
        ("qwen2_moe", "mlp_only_layers", "all"),
        ("qwen3_moe", "layer_types", ["sliding_attention"] * 3),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v2", "attention_bias", True),
        ("deepseek_v2", "num_key_value_heads", 2),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "n_group", 6),
        ("gpt_oss", "swiglu_alpha", 1.5),
        ("gpt_oss", "experts_per_token", 4),
        ("gpt_oss", "quantization_config", None),
        ("deepseek", "scoring_func", "sigmoid"),
        ("xverse", "num_experts_per_tok", 2),
        ("phimoe", "num_experts_per_tok", 3),
        ("phimoe", "attention_multiplier", 0.5),
        ("granitemoe", "shared_intermediate_size", 8),
        ("granitemoe", "residual_multiplier", 0),
        ("flex_olmo", "clip_qkv", 8.0),
    ],
)
def test_config_rejects_field_that_changes_the_maths(family, field, value):
    raw = raw_config(family, **{field: value})
    if field == "quantization_config":  # null is the only harmless spelling
        assert config_from_hf(raw).model_type == family
        return
    with pytest.raises(ConfigError, match=field):
        config_from_hf(raw)


def test_config_null_of_unknown_field_is_accepted():
    assert config_from_hf(raw_config("olmoe", some_new_feature=None)).num_layers == 3


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "axial"}, "unknown rope_type 'axial'"),
        ({"rope_type": "longrope"}, "rope short_factor has None numbers, .* list of 5"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1]},
            "rope long_factor has 1 numbers, expected a list of 5",
        ),
        ({"rope_type": "linear"}, "rope factor is null"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary"),
        ({"rope_type": "yarn", "factor": -1}, "rope factor is -1"),
        ({"rope_type": "yarn", "factor": 4, "truncate": 1}, "truncate is 1"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_config_rejects_bad_rope(rope, message):
    raw = raw_config("mixtral")
    with pytest.raises(ConfigError, match=message):
        config_from_hf(raw | {"rope_parameters": rope})


def test_config_rejects_missing_field_by_name():
    raw = raw_config("xverse")
    del raw["moe_top_k"]
    with pytest.raises(ConfigError, match="xverse lacks field 'moe_top_k'"):
        config_from_hf(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 1.0}, "rope_theta is 1.0, expected more than 1 for yarn"),
        (
            {"rope_scaling": DEEPSEEK_V2_LITE["rope_scaling"]
             | {"original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings is 0.5, expected 1 or more",
        ),
    ],
)  # fmt: skip
def test_yarn_out_of_range_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(DEEPSEEK_V2_LITE | changes)


def test_dynamic_rope_is_default_within_the_context():
    raw = raw_config("olmoe") | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert config_from_hf(raw).attention.rope.kind == "default"


@pytest.mark.parametrize("model_type", RECURRENT)
def test_layers_with_a_state_are_refused_by_what_they_keep(model_type):
    with pytest.raises(ConfigError, match=f"{model_type} has layers with a state"):
        config_from_hf({"model_type": model_type})
