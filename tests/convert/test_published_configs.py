"""Published config.json files, whose authors write more fields than transformers."""

import math

import numpy as np
import pytest

from moe_edge.checkpoint.schema import dense_items, item_shapes
from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.sizes import check_context
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout
from moe_edge.model.shapes import layer_shapes
from tests.support import published_configs as published

# Name -> what transformers makes of it, and weights in billions.
FILES = {
    "GLM_4_5_AIR": (
        {"rope.dim": 64, "rope.theta": 1e6, "qkv_bias": True, "out_bias": False},
        {"top_k": 8, "scoring": "sigmoid", "shared_dim": 1408, "norm_topk": True},
        (106.0, 107.0),
    ),
    "GLM_4_7_FLASH": (
        {"kind": "mla", "rope.dim": 64, "rope.interleaved": True, "head_dim": 256},
        {"top_k": 4, "routed_scaling": 1.8, "correction_bias": True},
        (29.0, 30.5),
    ),
    "SOLAR_OPEN_100B": (
        {"rope.dim": 128, "rope.kind": "yarn", "qk_norm": "none"},
        {"top_k": 8, "shared_dim": 1280},
        (101.0, 104.0),
    ),
    "DOTS_LLM1": (
        {"qk_norm": "head", "windows": (), "head_dim": 128},
        {"routed_scaling": 2.5, "shared_dim": 2816, "num_groups": 1},
        (142.0, 143.5),
    ),
    "MINIMAX_M2": (
        {"rope.dim": 64, "rope.theta": 5e6, "qk_norm": "full"},
        {"num_experts": 256, "norm_topk": True, "shared_dim": 0},
        (228.0, 230.0),
    ),
    "ERNIE_4_5_21B": (
        {"rope.interleaved": True, "rope.dim": 128, "qkv_bias": False},
        {"scoring": "softmax", "correction_bias": True, "shared_dim": 3072},
        (21.0, 22.5),
    ),
    "HUNYUAN_A13B": (
        {"qk_norm_after_rope": True, "rope.theta": 1e4 * 1000 ** (128 / 126)},
        {"num_experts": 64, "top_k": 8, "shared_dim": 3072, "expert_dim": 3072},
        (80.0, 81.0),
    ),
    "FLEX_OLMO_7X7B": (
        {"qk_norm": "full", "rope.theta": 5e5, "softmax_scale": None},
        {"scoring": "softmax", "norm_topk": False},
        (32.5, 33.5),
    ),
    "GRANITE_3_1B_A400M": (
        {"softmax_scale": 1 / 64, "num_kv_heads": 8},
        {"scoring": "softmax_topk", "shared_dim": 0},
        (1.3, 1.4),
    ),
    "PHI_3_5_MOE": (
        {"rope.attention_factor": 1.243163121016122, "windows": (), "out_bias": True},
        {"scoring": "sparsemixer", "nearness": 0.01},
        (41.0, 42.5),
    ),
    "DEEPSEEK_V32": (
        {"rope.interleaved": True, "rope.kind": "yarn", "q_lora_rank": 1536},
        {"num_groups": 8, "topk_groups": 4, "group_score": "top2"},
        (671.0, 673.0),
    ),
    "GLM_5": (
        {"head_dim": 256, "v_head_dim": 256, "rope.theta": 1e6, "rope.dim": 64},
        {"num_groups": 1, "shared_dim": 2048, "routed_scaling": 2.5},
        (740.0, 746.0),
    ),
    "K_EXAONE_236B": (
        {"qk_norm": "head", "rope.theta": 1e6, "windows": ((128,) * 3 + (None,)) * 12},
        {"correction_bias": True, "shared_dim": 2048},
        (235.0, 238.0),
    ),
    "LFM2_8B_A1B": (
        {"qk_norm": "head", "rope.theta": 1e6, "head_dim": 64, "num_kv_heads": 8},
        {"scoring": "sigmoid", "norm_epsilon": 1e-6, "correction_bias": True},
        (8.2, 8.5),
    ),
    "QWEN3_NEXT_80B": (
        {"rope.dim": 64, "rope.theta": 1e7, "output_gate": True},
        {"top_k": 10, "shared_dim": 512, "shared_gate": True, "norm_topk": True},
        (79.0, 81.0),
    ),
    "QWEN3_5_35B_A3B": (
        {"rope.dim": 64, "rope.theta": 1e7, "num_kv_heads": 2, "output_gate": True},
        {"num_experts": 256, "norm_topk": True},
        (34.0, 36.0),
    ),
}


def weights_of(config: ModelConfig) -> int:
    dense = sum(
        math.prod(shape)
        for item in dense_items(config)
        for shape in item_shapes(config, item).values()
    )
    experts = len(config.moe_layers) * config.moe.num_experts
    return dense + experts * RecordLayout.of(config).num_values


@pytest.mark.parametrize("name", FILES)
def test_published_file_is_the_model_that_its_authors_describe(name):
    attention, moe, (least, most) = FILES[name]
    config = config_from_hf(getattr(published, name))
    for field, value in attention.items():
        part = config.attention
        for step in field.split("."):
            part = getattr(part, step)
        assert part == value, field
    assert {field: getattr(config.moe, field) for field in moe} == moe
    assert least < weights_of(config) / 1e9 < most


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("LFM2_8B_A1B", "conv_bias", True),
        ("LFM2_8B_A1B", "layer_types", ["conv"] * 24),
        ("LFM2_8B_A1B", "layer_types", ["full_attention"] * 24),
        ("LFM2_8B_A1B", "conv_L_cache", 1),
        ("QWEN3_NEXT_80B", "attention_bias", True),
        ("QWEN3_NEXT_80B", "full_attention_interval", 1),
        ("QWEN3_NEXT_80B", "attn_output_gate", False),
        ("GLM_4_5_AIR", "scoring_func", "softmax"),
        ("GLM_4_5_AIR", "n_group", 128),
        ("GLM_4_5_AIR", "partial_rotary_factor", 1.5),
        ("GLM_4_5_AIR", "partial_rotary_factor", 0.01),
        ("GLM_4_5_AIR", "topk_method", "greedy"),
        ("GLM_4_7_FLASH", "attention_bias", True),
        ("GLM_4_7_FLASH", "first_k_dense_replace", 2),
        ("GLM_4_7_FLASH", "mlp_layer_types", ["dense", "sparse"]),
        ("GLM_4_7_FLASH", "mlp_layer_types", ["moe"] * 47),
        ("GLM_4_7_FLASH", "partial_rotary_factor", 0.5),
        ("SOLAR_OPEN_100B", "partial_rotary_factor", 0.5),
        ("SOLAR_OPEN_100B", "use_qk_norm", True),
        ("SOLAR_OPEN_100B", "first_k_dense_replace", 1),
        ("DOTS_LLM1", "scoring_func", "softmax"),
        ("DOTS_LLM1", "n_shared_experts", None),
        ("MINIMAX_M2", "attn_type_list", [0] + [1] * 61),
        ("MINIMAX_M2", "qk_norm_type", "per_head"),
        ("MINIMAX_M2", "scoring_func", "softmax"),
        ("MINIMAX_M2", "shared_intermediate_size", 1536),
        ("MINIMAX_M2", "use_qk_norm", False),
        ("MINIMAX_M2", "use_routing_bias", False),
        ("MINIMAX_M2", "attention_bias", True),
        ("MINIMAX_M2", "rotary_dim", 63),
        ("ERNIE_4_5_21B", "use_bias", True),
        ("ERNIE_4_5_21B", "use_rmsnorm", False),
        ("ERNIE_4_5_21B", "moe_norm_min", 1e-3),
        ("ERNIE_4_5_21B", "moe_gate", "top2"),
        ("ERNIE_4_5_21B", "moe_gate_act", "sigmoid"),
        ("ERNIE_4_5_21B", "moe_use_aux_free", False),
        ("HUNYUAN_A13B", "use_cla", True),
        ("HUNYUAN_A13B", "moe_topk", [8] * 31 + [4]),
        ("HUNYUAN_A13B", "moe_intermediate_size", [1536] * 32),
        ("HUNYUAN_A13B", "num_shared_expert", 2),
        ("HUNYUAN_A13B", "use_qk_norm", False),
        ("HUNYUAN_A13B", "attention_head_dim", 64),
        ("HUNYUAN_A13B", "norm_topk_prob", False),
        ("GRANITE_3_1B_A400M", "embedding_multiplier", None),
        ("GRANITE_3_1B_A400M", "normalization_function", "layernorm"),
        ("PHI_3_5_MOE", "scoring_func", "softmax"),
        ("PHI_3_5_MOE", "mlp_bias", True),
        ("DEEPSEEK_V32", "q_lora_rank", None),
        ("DEEPSEEK_V32", "indexer_rope_interleave", True),
        ("DEEPSEEK_V32", "attention_bias", True),
        ("DEEPSEEK_V32", "layer_types", ["full_attention"] * 61),
        ("GLM_5", "indexer_rope_interleave", False),
        ("GLM_5", "rope_interleave", False),
        ("GLM_5", "indexer_types", ["full"] * 77),
        ("GLM_5", "index_topk_pattern", "F" * 77 + "X"),
        ("K_EXAONE_236B", "is_moe_layer", [True] * 48),
        ("K_EXAONE_236B", "first_last_k_dense_replace", 2),
        ("K_EXAONE_236B", "sliding_window", None),
    ],
)
def test_another_value_of_a_field_that_changes_the_maths_is_refused(name, field, value):
    raw = getattr(published, name) | {field: value}
    with pytest.raises(ConfigError, match=field):
        config_from_hf(raw)


def test_context_ends_where_sparse_attention_would_choose():
    for name, field in (("DEEPSEEK_V32", "deepseek_v32"), ("GLM_5", "glm_moe_dsa")):
        raw = getattr(published, name)
        config = config_from_hf(raw)
        assert (config.model_type, config.max_positions) == (field, 2048)
        with pytest.raises(
            CapacityError,
            match=r"context of 2048 \(beyond index_topk=2048 its sparse attention "
            r"chooses positions, which is not implemented\); lower it",
        ):
            check_context(2049, config)
        assert config_from_hf(raw | {"index_topk": 1 << 18}).positions_end == ""
    # Of YaRN the file's own context counts.
    assert config_from_hf(published.DEEPSEEK_V32).attention.rope.factor == 40


def test_layers_without_an_indexer_have_none_of_its_tensors():
    def layers(**changes):
        return config_from_hf(published.GLM_5 | changes).indexer.layers

    assert layers() == tuple(range(78))
    assert layers(index_topk_freq=4)[:4] == (0, 1, 5, 9)
    assert layers(index_topk_pattern="FSS" * 26) == tuple(range(0, 78, 3))
    types = ["full"] * 2 + ["shared"] * 76
    config = config_from_hf(published.GLM_5 | {"indexer_types": types})
    has = ["indexer.k_norm_bias" in item_shapes(config, layer) for layer in (1, 2)]
    assert has == [True, False]
    assert not any(name.startswith("indexer") for name in layer_shapes(config, 1))


def test_rope_alpha_is_refused_where_it_means_nothing():
    raw = published.HUNYUAN_A13B
    for rope, message in (
        ({"type": "linear", "factor": 2.0, "alpha": 3.0}, "unknown fields .*alpha"),
        ({"type": "dynamic", "alpha": -3.0}, "rope alpha is -3.0, expected a positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_from_hf(raw | {"rope_scaling": rope})
    tiny = {"hidden_size": 64, "attention_head_dim": 2}
    with pytest.raises(ConfigError, match="rope alpha needs a head_dim above 2, got 2"):
        config_from_hf(raw | tiny)


def test_silent_files_are_filled_in_as_by_transformers():
    def without(raw, *names):
        return config_from_hf({k: v for k, v in raw.items() if k not in names})

    glm = without(published.GLM_4_5_AIR, "partial_rotary_factor", "rope_theta")
    assert (glm.attention.rope.dim, glm.attention.rope.theta) == (64, 1e4)
    solar = without(published.SOLAR_OPEN_100B, "rope_theta", "head_dim")
    assert (solar.attention.head_dim, solar.attention.rope.theta) == (128, 1e6)
    minimax = without(published.MINIMAX_M2, "rotary_dim", "rope_theta", "head_dim")
    rope = minimax.attention.rope
    assert (rope.dim, rope.theta, minimax.bos_id) == (128, 5e6, 200_034)
    ernie = without(
        published.ERNIE_4_5_21B, "tie_word_embeddings", "moe_layer_end_index"
    )
    assert ernie.tie_embeddings and ernie.dense_layers == (0,)
    dots = without(published.DOTS_LLM1 | {"max_window_layers": 60}, "sliding_window")
    np.testing.assert_array_equal(dots.attention.windows[-3:], [None, 4096, 4096])
