"""Published configs of families whose layers differ, and what they refuse.

Values are those of the files on the hub, from public copies; lists of layers are cut to
fewer layers.
"""

import numpy as np
import pytest

from moe_edge.checkpoint.schema import dense_items
from moe_edge.convert.families import FAMILIES, config_from_hf
from moe_edge.convert.hf_reader import HfReader
from moe_edge.core.checks import ConfigError
from tests.support.tiny_checkpoints import random_tensors, raw_config, write_folder

MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_dropout": 0.0,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 7,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 152576,
}


LLAMA4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": {
        "_attn_implementation_autoset": True,
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "bos_token_id": 200000,
        "cache_implementation": "hybrid",
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "moe_layers": [0, 1, 2, 3, 4],
        "no_rope_layers": [1, 1, 1, 0, 1],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}


_TYPES = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": None,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoi_token_id": 258882,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "initializer_range": 0.02,
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": True,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 2112,
        "layer_types": _TYPES,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
}


def gemma4(**changes) -> dict:
    """The text model of Gemma 4 with other fields; `...` takes a field away."""
    text = GEMMA4["text_config"] | changes
    return {name: value for name, value in text.items() if value is not ...}


def proportional(**changes) -> dict:
    """Its rope parameters with other ones of full layers."""
    both = GEMMA4["text_config"]["rope_parameters"]
    full = both["full_attention"] | changes
    return {"rope_parameters": both | {"full_attention": full}}


def test_gemma4_as_published():
    config = config_from_hf(GEMMA4)
    sliding, full = config.attentions
    assert config.attention_kinds == (0,) * 5 + (1,)
    assert [config.window(i) for i in (4, 5)] == [1024, None]
    assert (sliding.head_dim, sliding.num_kv_heads) == (256, 8)
    assert (full.head_dim, full.num_kv_heads) == (512, 2)
    assert (sliding.k_is_v, full.k_is_v) == (False, True)
    assert (full.rope.dim, full.rope.turning, full.rope.theta) == (512, 64, 1e6)
    assert (sliding.rope.kind, sliding.rope.theta) == ("default", 1e4)
    assert {(a.scale, a.v_norm, a.qk_norm) for a in config.attentions} == {
        (1.0, True, "head")
    }
    moe = config.moe
    assert (moe.top_k, moe.expert_dim, moe.shared_dim) == (8, 704, 2112)
    assert config.tie_embeddings and config.logit_cap == 30.0
    assert config.embed_scale == 2816**0.5 and config.activation == "gelu_tanh"
    # The whole's ids before the text model's.
    assert (config.bos_id, config.eos_ids) == (2, (1, 106))
    # Newer files name the sizes of layers, and layers are found without a list of them.
    newer = gemma4(
        global_head_dim=...,
        num_global_key_value_heads=...,
        layer_types=...,
        per_layer_config={"05": {"head_dim": 512, "num_key_value_heads": 2}},
    )
    assert config_from_hf(newer) == config_from_hf(gemma4())
    assert config_from_hf(gemma4()).eos_ids == (1,)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size_per_layer_input": 256}, "layer_input is 256, expected 0"),
        ({"hidden_size_per_layer_input": ...}, "layer_input is 256, expected 0"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp is true"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is"),
        ({"enable_moe_block": ...}, "enable_moe_block is false"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"per_layer_config": {"7": {"head_dim": 8}}}, "names are layers 0..5"),
        (
            {"per_layer_config": {"1": {"sliding_window": 8}}},
            "layer 1 says sliding_window is 8; expected numbers for head_dim and",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
            "expected an object with those of full_attention",
        ),
        (
            proportional(partial_rotary_factor=0.001),
            r"turns 0 of the 256 pairs of a head, expected 1..256",
        ),
        (proportional(stretch=2), r"unknown fields .'stretch'."),
    ],
)
def test_what_gemma4_cannot_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(gemma4(**changes))


def test_llama4_as_published():
    config = config_from_hf(LLAMA4)
    assert config.model_type == "llama4_text" and not config.tie_embeddings
    assert config.eos_ids == (200001, 200007, 200008) and config.bos_id == 200000
    assert config.attention_kinds == (0, 0, 0, 1, 0)
    rotary, plain = config.attentions
    assert rotary.chunked and not plain.chunked and plain.rope is None
    assert [config.window(i) for i in (2, 3)] == [8192, None]
    assert (rotary.rope.kind, rotary.rope.interleaved) == ("llama3", True)
    assert (rotary.qk_norm, plain.qk_norm) == ("unit", "none")
    assert (rotary.temperature, plain.temperature) == (0.0, 0.1)
    assert config.moe.input_scaled and config.moe.shared_dim == 8192
    assert config.dense_layers == () and config.dense_dim == 16384
    every_other = config_from_hf(
        with_text(moe_layers=None, interleave_moe_layer_step=2)
    )
    assert every_other.dense_layers == (0, 2, 4)


def with_text(**changes) -> dict:
    """Llama 4 with other fields of the text model."""
    return LLAMA4 | {"text_config": LLAMA4["text_config"] | changes}


@pytest.mark.parametrize(
    "raw, message",
    [
        (with_text(num_experts_per_tok=2), "compute one a token.*got top_k 2"),
        (with_text(attn_temperature_tuning="no"), "attn_temperature_tuning is 'no'"),
        (with_text(moe_layers=[7]), r"moe_layers is .7., expected .* 0..4"),
        (with_text(for_llm_compressor=True), "for_llm_compressor is true"),
        (with_text(qk_clip=3.0), "qk_clip=3.0"),
        (LLAMA4 | {"text_config": None}, "text_config is None, expected an object"),
    ],
)
def test_what_llama4_cannot_is_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(raw)


# Of a folder with other modalities: how names of its text model and of the rest begin.
PREFIXES = {
    "llama4_text": (
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        ["vision_model.patch.weight", "multi_modal_projector.linear_1.weight"],
    ),
    "gemma4_text": (
        {"model.": "model.language_model."},
        ["model.vision_tower.std_bias", "model.embed_vision.embedding_projection"],
    ),
}


@pytest.mark.parametrize("family", PREFIXES)
def test_text_model_of_a_folder_with_other_modalities(family, tmp_path):
    raw = raw_config(family)
    text = HfReader(write_folder(tmp_path / "text", raw))
    renamed, others = PREFIXES[family]
    tensors = {}
    for name, array in random_tensors(raw).items():
        ours = next(each for each in renamed if name.startswith(each))
        tensors[renamed[ours] + name.removeprefix(ours)] = array
    tensors |= {name: np.ones((2, 3), np.float32) for name in others}
    whole = {"model_type": FAMILIES[family].whole, "text_config": raw}
    reader = HfReader(write_folder(tmp_path / "whole", whole, tensors))
    assert reader.config == text.config and sorted(reader.dropped) == sorted(others)
    for item in dense_items(reader.config):
        for name, array in text.dense(item).items():
            np.testing.assert_array_equal(reader.dense(item)[name], array)
    layer = reader.config.moe_layers[0]
    np.testing.assert_array_equal(reader.experts(layer), text.experts(layer))


def test_mimo_as_published():
    config = config_from_hf(MIMO)
    full, sliding = config.attentions
    assert config.attention_kinds == (0, 1, 1, 1, 1, 0, 1)
    # A token sees itself and 128 before it.
    assert [config.window(i) for i in (0, 1, 5)] == [None, 129, None]
    assert (full.num_kv_heads, sliding.num_kv_heads) == (4, 8)
    assert (full.sinks, sliding.sinks) == (False, True)
    assert (full.rope.theta, sliding.rope.theta) == (5e6, 1e4)
    assert {each.rope.dim for each in config.attentions} == {64}
    assert {(a.head_dim, a.value_dim, a.value_scale) for a in config.attentions} == {
        (192, 128, 0.707)
    }
    assert config.dense_layers == (0,) and config.moe.routed_scaling == 1.0


@pytest.mark.parametrize(
    "model, changes, message",
    [
        ("mimo", {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads is 4, exp"),
        ("mimo", {"add_full_attention_sink_bias": True}, "add_full_attention_sink"),
        ("mimo", {"layernorm_epsilon": 1e-6}, "layernorm_epsilon is 1e-06"),
        ("mimo", {"hybrid_layer_pattern": [0, 2]}, "hybrid_layer_pattern is .0, 2.*7"),
        ("mimo", {"layer_types": ["full_attention"] * 7}, "as hybrid_layer_pattern"),
        ("mimo", {"attention_sink_scale": 2.0}, "attention_sink_scale=2.0"),
        ("mimo_v2_flash", {"sliding_window": None}, "sliding_window is None but"),
        (
            "mimo_v2_flash",
            {"rope_parameters": {"rope_theta": 1e4}},
            "expected an object with those of full_attention",
        ),
    ],
)
def test_what_changes_the_maths_is_refused(model, changes, message):
    raw = PUBLISHED[model] if model in PUBLISHED else raw_config(model)
    with pytest.raises(ConfigError, match=message):
        config_from_hf(raw | changes)


PUBLISHED = {"mimo": MIMO}
