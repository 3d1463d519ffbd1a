"""Tensors of published folders: FP8, other names of one tensor, later-token modules."""

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError
from tests.support.conversion import assert_same_tensors, convert, load_all
from tests.support.quantised import FP8
from tests.support.tiny_checkpoints import random_tensors, raw_config, write_folder

# Family -> another name of a tensor, by the published one's ending.
OTHER_NAMES = {
    "minimax_m2": {
        "block_sparse_moe.e_score_correction_bias": "mlp.e_score_correction_bias",
        "block_sparse_moe.gate.weight": "mlp.gate.weight",
    },
    "ernie4_5_moe": {
        "mlp.moe_statics.e_score_correction_bias": (
            "mlp.gate.moe_statics.e_score_correction_bias"
        )
    },
    "granitemoeshared": {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "router.layer.weight": "router.weight",
    },
    "phimoe": {
        "block_sparse_moe.gate.": "mlp.router.",
        "block_sparse_moe.experts.": "mlp.experts.",
    },
    "exaone_moe": {"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
}
_BLOCK = "block_sparse_moe"
LATER_TOKENS = {
    "glm4_moe": ["model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight"],
    "glm4_moe_lite": ["model.layers.3.eh_proj.weight"],
    "minimax_m2": [f"model.layers.{i}.eh_proj.weight" for i in (3, 4, 5)],
    "deepseek_v32": ["model.layers.3.eh_proj.weight"]
    + ["model.layers.3.self_attn.indexer.wk.weight"],
    "exaone_moe": ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
    "ernie4_5_moe": ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.w"],
}


def opened(folder, raw, tensors):
    return open_checkpoint(write_folder(folder, raw, tensors))


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_other_names_are_read_and_published_ones_written(family, tmp_path):
    raw = raw_config(family)
    tensors = random_tensors(raw)

    def renamed(name):
        for published, other in OTHER_NAMES[family].items():
            name = name.replace(published, other)
        return name

    other = {renamed(name): array for name, array in tensors.items()}
    assert len(other.keys() - tensors.keys()) >= 2
    hf = write_folder(tmp_path / "hf", raw, other)
    convert(hf, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert_same_tensors(load_all(tmp_path / "back"), tensors)


@pytest.mark.parametrize("family", LATER_TOKENS)
def test_modules_that_predict_later_tokens_are_left_out(family, tmp_path):
    raw = raw_config(family)
    extra = {name: np.ones((2, 3), np.float32) for name in LATER_TOKENS[family]}
    reader = opened(tmp_path / "hf", raw, random_tensors(raw) | extra)
    assert sorted(reader.dropped) == sorted(extra)


@pytest.mark.parametrize("family", ["minimax_m2", "glm4_moe", "deepseek_v32"])
def test_block_fp8_is_dequantised(family, tmp_path):
    raw = raw_config(family, torch_dtype="bfloat16", quantization_config=FP8)
    rng, stored, wanted = np.random.default_rng(1), {}, {}
    for name, array in random_tensors(raw, "bfloat16").items():
        stored[name] = wanted[name] = array
        if "_proj.weight" in name or ".experts." in name:
            rows, cols = array.shape
            grid = (-(-rows // 16), -(-cols // 16))
            scale = rng.uniform(0.1, 2.0, grid).astype(np.float32)
            weight = array.astype(ml_dtypes.float8_e4m3fn)
            stored |= {name: weight, name + "_scale_inv": scale}
            wide = np.repeat(np.repeat(scale, 16, 0), 16, 1)[:rows, :cols]
            wanted[name] = (weight.astype(np.float32) * wide).astype(array.dtype)
    packed = opened(tmp_path / "fp8", raw, stored)
    plain = opened(tmp_path / "plain", raw_config(family), wanted)
    assert packed.quantized == "fp8" and packed.dropped == []
    assert packed.content_sha256() == plain.content_sha256()


@pytest.mark.parametrize(
    ("family", "name", "shape", "expected"),
    [
        ("ernie4_5_moe", "mlp.moe_statics.e_score_correction_bias", (6,), r"\(1, 6\)"),
        ("minimax_m2", "self_attn.q_norm.weight", (10,), r"\(40,\)"),
        ("hunyuan_v1_moe", "self_attn.query_layernorm.weight", (40,), r"\(10,\)"),
        ("hunyuan_v1_moe", "mlp.shared_mlp.up_proj.weight", (28, 48), r"\(20, 48\)"),
        ("glm4_moe", "self_attn.k_norm.weight", (24,), r"\(12,\)"),
        ("glm4_moe_lite", "self_attn.q_b_proj.weight", (64, 28), r"\(64, 18\)"),
        ("dots1", "mlp.gate.e_score_correction_bias", (1, 6), r"\(6,\)"),
        ("solar_open", "mlp.shared_experts.up_proj.weight", (20, 48), r"\(40, 48\)"),
        ("granitemoe", f"{_BLOCK}.input_linear.weight", (6, 20, 48), r"\(6, 40, 48\)"),
        ("granitemoeshared", "shared_mlp.input_linear.weight", (36, 48), r"\(72, 48\)"),
        ("phimoe", "post_attention_layernorm.bias", (1, 48), r"\(48,\)"),
        ("flex_olmo", "post_feedforward_layernorm.weight", (20,), r"\(48,\)"),
        ("deepseek_v32", "self_attn.indexer.wk.weight", (36, 48), r"\(12, 48\)"),
        ("exaone_moe", "mlp.e_score_correction_bias", (1, 6), r"\(6,\)"),
    ],
)
def test_tensor_of_a_wrong_shape_is_refused(family, name, shape, expected, tmp_path):
    raw, name = raw_config(family), f"model.layers.2.{name}"
    tensors = random_tensors(raw)
    assert name in tensors
    tensors[name] = np.ones(shape, np.float32)
    got = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
    message = rf"{name} .*shape \({got}\), expected {expected}"
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "hf", raw, tensors)
