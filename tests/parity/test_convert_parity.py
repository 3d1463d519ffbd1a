"""What transformers saves is read, written back, and computes the same logits."""

import importlib.util

import numpy as np
import pytest

if any(importlib.util.find_spec(m) is None for m in ("torch", "transformers")):
    pytest.skip("needs the extra `parity`", allow_module_level=True)

import torch
from safetensors.torch import load_file
from transformers.integrations import mxfp4
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moe_edge.convert import quant_mxfp4, quant_scaled
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from tests.parity.models import CASES, FAMILIES, hf_checkpoint, hf_logits

pytestmark = [
    pytest.mark.parity,
    # transformers warns about tiny vocabularies and deprecations of its own.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("case", CASES)
def test_round_trip_gives_transformers_its_own_logits(case, tmp_path):
    hf = hf_checkpoint(case, tmp_path / "hf")
    convert_checkpoint(hf, tmp_path / "ours", progress=False)
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", to="hf", progress=False)
    ids = np.random.default_rng(0).integers(0, 101, (2, 70))
    expected = hf_logits(hf, ids)
    assert expected.std() > 0.1
    assert torch.equal(hf_logits(tmp_path / "back", ids), expected)
    source = load_file(hf / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert sorted(back) == sorted(source)
    assert all(torch.equal(back[name], source[name]) for name in source)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_model_round_trip_is_exact(family, tmp_path):
    hf = hf_checkpoint(family, tmp_path / "hf", torch.bfloat16)
    convert_checkpoint(hf, tmp_path / "ours", progress=False)
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", to="hf", progress=False)
    source = load_file(hf / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert sorted(back) == sorted(source)
    for name in source:
        assert back[name].dtype == source[name].dtype
        assert torch.equal(back[name], source[name])
    assert open_checkpoint(tmp_path / "ours").dtype.name == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_equals_transformers(dtype):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 4, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (3, 10, 4), dtype=np.uint8)
    expected = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=getattr(torch, dtype)
    )
    from moe_edge.checkpoint.dtypes import WEIGHT_DTYPES

    for expert in range(3):
        got = quant_mxfp4.dequantize(
            blocks[expert], scales[expert], WEIGHT_DTYPES[dtype]
        ).T
        np.testing.assert_array_equal(
            got.astype(np.float32), expected[expert].float().numpy()
        )


def test_fp8_equals_transformers():
    torch.manual_seed(0)
    weight = torch.randn(32, 48).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.1
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
    import ml_dtypes

    got = quant_scaled.dequantize(
        weight.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn),
        scales.numpy(),
        (16, 16),
        np.dtype(ml_dtypes.bfloat16),
    )
    np.testing.assert_array_equal(got.astype(np.float32), expected.float().numpy())
