"""Tiny quantised Hugging Face folders."""

import ml_dtypes
import numpy as np

from tests.support.tiny_checkpoints import random_tensors, raw_config, write_folder

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 16],
}


def fp8_folder(path, **changes):
    """DeepSeek-V3 whose projections are FP8; returns the wanted float32 values."""
    changes = {"torch_dtype": "bfloat16", "quantization_config": FP8} | changes
    raw = raw_config("deepseek_v3", **changes)
    rng = np.random.default_rng(1)
    stored, wanted = {}, {}
    for name, array in random_tensors(raw, "bfloat16").items():
        if name.endswith("e_score_correction_bias"):
            array = array.astype(np.float32)
        stored[name] = wanted[name] = array
        if "_proj" in name:
            rows, cols = array.shape
            grid = (-(-rows // 16), -(-cols // 16))
            scale = rng.uniform(0.1, 2.0, grid).astype(np.float32)
            weight = array.astype(ml_dtypes.float8_e4m3fn)
            stored |= {name: weight, name + "_scale_inv": scale}
            wide = np.repeat(np.repeat(scale, 16, 0), 16, 1)[:rows, :cols]
            wanted[name] = weight.astype(np.float32) * wide
    return write_folder(path, raw, stored), wanted
