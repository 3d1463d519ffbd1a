"""Published sizes without their bytes: Hugging Face folders of sparse files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_edge.convert.families import config_from_hf
from moe_edge.convert.rules import hf_shapes
from moe_edge.convert.safetensors_reader import DTYPE_NAMES, DTYPES, INDEX_NAME

BLOCK = 128  # of FP8: rows and columns that share a scale
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
# DeepSeek-V3's config.json, the fields that decide sizes and maths (Hugging Face,
# deepseek-ai/DeepSeek-V3): 671 B parameters, 91,991 tensors with the scales of FP8
# that its 61 layers hold (its 163 files have one layer more, for several tokens).
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": FP8,
}


def fp8_tensors(raw: dict) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Name -> dtype and shape of a folder whose matrices in layers are FP8."""
    bf16, fp8, f32 = DTYPES["BF16"], DTYPES["F8_E4M3"], DTYPES["F32"]
    found: dict[str, tuple] = {}
    for name, shape in hf_shapes(config_from_hf(raw)).items():
        is_quantised = name.endswith("proj.weight") or "proj_with_mqa" in name
        if not (is_quantised and len(shape) == 2):
            found[name] = f32 if name.endswith("correction_bias") else bf16, shape
            continue
        found[name] = fp8, shape
        scales = tuple(-(-size // BLOCK) for size in shape)
        found[f"{name}_scale_inv"] = f32, scales
    return found


def write_sparse(
    folder: Path,
    raw: dict,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    shard_bytes: int = 4_300_000_000,
) -> Path:
    """config.json, index and shards of zeros, which take no room on the disk."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    shards: list[dict] = [{}]
    begin = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and begin + size > shard_bytes:
            shards.append({})
            begin = 0
        kind = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape)}
        shards[-1][name] = kind | {"data_offsets": [begin, begin + size]}
        begin += size
    weight_map = {}
    for number, header in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(header, file)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            end = max(each["data_offsets"][1] for each in header.values())
            out.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return folder
