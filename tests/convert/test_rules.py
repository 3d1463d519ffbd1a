"""Tensor names, written out by hand as published files and transformers have them."""

import numpy as np
import pytest

from moe_edge.convert import rules
from moe_edge.convert.families import config_from_hf
from moe_edge.model.record import RecordLayout
from tests.support.tiny_checkpoints import raw_config

NORMS = "input_layernorm.weight post_attention_layernorm.weight"
QKVO = " ".join(f"self_attn.{name}_proj.weight" for name in "qkvo")
QK_NORM = "self_attn.q_norm.weight self_attn.k_norm.weight"
MLA = (
    "self_attn.kv_a_proj_with_mqa.weight self_attn.kv_a_layernorm.weight "
    "self_attn.kv_b_proj.weight self_attn.o_proj.weight"
)
Q_LORA = "self_attn.q_a_proj.weight self_attn.q_a_layernorm.weight self_attn.q_b_proj"
SHARED = " ".join(
    f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")
)
# Family -> (a MoE layer, its dense names, names of the layer's expert 1).
EXPERT = "mlp.experts.1.gate_proj mlp.experts.1.up_proj mlp.experts.1.down_proj"
PUBLISHED = {
    "olmoe": (0, f"{QKVO} {QK_NORM} mlp.gate.weight", EXPERT),
    "mixtral": (
        0,
        f"{QKVO} block_sparse_moe.gate.weight",
        "block_sparse_moe.experts.1.w1 block_sparse_moe.experts.1.w3 "
        "block_sparse_moe.experts.1.w2",
    ),
    "qwen2_moe": (
        0,
        f"{QKVO} {SHARED.replace('shared_experts', 'shared_expert')} mlp.gate.weight "
        "mlp.shared_expert_gate.weight self_attn.q_proj.bias self_attn.k_proj.bias "
        "self_attn.v_proj.bias",
        EXPERT,
    ),
    "qwen3_moe": (1, f"{QKVO} {QK_NORM} mlp.gate.weight", EXPERT),
    "deepseek_v2": (
        1,
        f"{MLA} {SHARED} self_attn.q_proj.weight mlp.gate.weight",
        EXPERT,
    ),
    "deepseek_v3": (
        1,
        f"{MLA} {SHARED} {Q_LORA}.weight mlp.gate.weight "
        "mlp.gate.e_score_correction_bias",
        EXPERT,
    ),
    "deepseek": (1, f"{QKVO} {SHARED} mlp.gate.weight", EXPERT),
    "xverse": (0, f"{QKVO} {SHARED} mlp.router.weight", EXPERT),
}


def config(family):
    return config_from_hf(raw_config(family))


@pytest.mark.parametrize("family", PUBLISHED)
def test_names_of_a_moe_layer_are_the_published_ones(family):
    layer, dense, expert = PUBLISHED[family]
    prefix = f"model.layers.{layer}."
    got = rules.dense_names(config(family), layer).values()
    assert sorted(got) == sorted(prefix + n for n in f"{dense} {NORMS}".split())
    got = rules.expert_names(config(family), layer, 1)
    assert list(got) == ["gate", "up", "down"]
    assert list(got.values()) == [f"{prefix}{n}.weight" for n in expert.split()]


def test_names_of_gpt_oss_are_the_published_ones():
    prefix = "model.layers.1."
    biases = [f"self_attn.{name}_proj.bias" for name in "qkvo"]
    dense = f"{QKVO} {NORMS} self_attn.sinks mlp.router.weight mlp.router.bias".split()
    got = rules.dense_names(config("gpt_oss"), 1).values()
    assert sorted(got) == sorted(prefix + name for name in dense + biases)
    assert rules.expert_shapes(config("gpt_oss"), 1) == {
        prefix + "mlp.experts.gate_up_proj": (6, 64, 64),
        prefix + "mlp.experts.gate_up_proj_bias": (6, 64),
        prefix + "mlp.experts.down_proj": (6, 32, 64),
        prefix + "mlp.experts.down_proj_bias": (6, 64),
    }


def test_names_of_granite_are_the_published_ones():
    found, prefix = config("granitemoeshared"), "model.layers.1."
    shapes = {
        name.removeprefix(prefix): shape
        for name, shape in rules.hf_shapes(found).items()
        if name.startswith(prefix) and "self_attn" not in name
    }
    assert shapes == {
        "input_layernorm.weight": (48,),
        "post_attention_layernorm.weight": (48,),
        "block_sparse_moe.router.layer.weight": (6, 48),
        "block_sparse_moe.input_linear.weight": (6, 40, 48),
        "block_sparse_moe.output_linear.weight": (6, 48, 20),
        "shared_mlp.input_linear.weight": (72, 48),
        "shared_mlp.output_linear.weight": (48, 36),
    }


def test_norms_behind_branches_are_named_as_published():
    names = rules.dense_names(config("flex_olmo"), 1)
    assert {c: n for c, n in names.items() if c.endswith("after_norm")} == {
        "attn_after_norm": "model.layers.1.post_attention_layernorm.weight",
        "mlp_after_norm": "model.layers.1.post_feedforward_layernorm.weight",
    }
    assert "model.layers.1.input_layernorm.weight" not in names.values()


def test_names_outside_and_of_dense_layers():
    names = list(rules.hf_shapes(config("deepseek_v3")))
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(
        names
    )
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.0.mlp.gate.weight" not in names
    assert "lm_head.weight" not in rules.hf_shapes(config("qwen2_moe"))


def test_records_become_fused_tensors_interleaved():
    gpt_oss = config("gpt_oss")
    layout = RecordLayout.of(gpt_oss)
    rng = np.random.default_rng(0)
    records = rng.standard_normal((2, layout.size), np.float32)
    pieces = list(rules.records_to_hf(gpt_oss, 0, 3, records))
    gate_up = pieces[0]
    assert gate_up.name == "model.layers.0.mlp.experts.gate_up_proj"
    assert gate_up.first == 3 * 64 * 64
    gate, up = (layout.part(records[0], part) for part in ("gate", "up"))
    np.testing.assert_array_equal(gate_up.array[:, 0::2], gate.T)
    np.testing.assert_array_equal(gate_up.array[:, 1::2], up.T)
    np.testing.assert_array_equal(pieces[6].array, layout.part(records[1], "down").T)
