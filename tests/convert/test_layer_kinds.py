"""Published configs of families whose layers differ, and what they refuse.

Values are those of the files on the hub, from public copies; lists of layers are cut to
fewer layers.
"""

import pytest

from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import ConfigError
from tests.support.tiny_checkpoints import raw_config

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
