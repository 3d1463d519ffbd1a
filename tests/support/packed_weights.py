"""Quantised folders of the hub's formats, packed straight from their definitions.

Each format is a function of a weight's name and shape `[out, in]`: the tensors that
stand for it in a file, and the float32 values they mean.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.tiny_checkpoints import random_tensors, raw_config, write_folder

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "head_dim": 12,
}
GROUP = 16  # divides every input width: 64, 80, 48 and 32
BLOCK = (24, 16)  # of weights that share an FP8 scale; rows are not whole blocks
BFLOAT16 = ml_dtypes.bfloat16


def words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """int32 words of codes along an axis, the first code in the lowest bits."""
    per = 32 // bits
    codes = np.moveaxis(codes.astype(np.int64), axis, 0)
    padded = np.zeros((-(-len(codes) // per) * per, *codes.shape[1:]), np.int64)
    padded[: len(codes)] = codes
    packed = sum(padded[j::per] << (bits * j) for j in range(per))
    return np.moveaxis(packed, 0, axis).astype(np.uint32).view(np.int32)


@dataclasses.dataclass
class Format:
    """One format; `pack(rng, name, shape) -> (stored tensors, values)`."""

    section: dict[str, Any]
    pack: Callable
    dtype: str = "bfloat16"  # of what is read without --dtype
    fused: bool = False  # experts of a layer in one tensor


def _values(codes, zeros, scales, groups):
    """(q - zero) * scale of codes `[out, in]`, zeros and scales `[out, G]`."""
    less = codes.astype(np.float32) - zeros.astype(np.float32)[:, groups]
    return less * scales.astype(np.float32)[:, groups]


def _scales(rng, shape, dtype):
    return rng.uniform(0.01, 0.2, shape).astype(dtype)


def _group_of(inputs, group):
    return np.arange(inputs) // (group or inputs)


def _compressed(format, weights, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.11.0",
    } | more


def pack_quantized(
    bits=4, group=GROUP, symmetric=True, order=False, dtype=BFLOAT16
) -> Format:
    def pack(rng, name, shape):
        rows, cols = shape
        groups = _group_of(cols, group)
        module = name.removesuffix(".weight")
        stored = {}
        if order:
            groups = rng.permutation(groups)
            stored[module + ".weight_g_idx"] = groups.astype(np.int32)
        count, half = groups.max() + 1, 1 << (bits - 1)
        codes = rng.integers(0, 2 * half, shape)
        zeros = np.full((rows, count), half)
        if not symmetric:
            zeros = rng.integers(0, 2 * half, zeros.shape)
            stored[module + ".weight_zero_point"] = words(zeros, bits, 0)
        scales = _scales(rng, (rows, count), dtype)
        stored |= {
            module + ".weight_packed": words(codes, bits, 1),
            module + ".weight_scale": scales,
            module + ".weight_shape": np.array(shape, np.int64),
        }
        return stored, _values(codes, zeros, scales, groups)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "actorder": "group" if order else None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    name = np.dtype(dtype).name
    section = _compressed("pack-quantized", weights)
    return Format(section, pack, "float16" if name == "float16" else "bfloat16")


def awq(group=GROUP) -> Format:
    def packed(codes):  # [rows, out]: a word holds outputs 0 2 4 6 1 3 5 7
        mixed = np.empty_like(codes)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            mixed[:, place::8] = codes[:, output::8]
        return words(mixed, 4, 1)

    def pack(rng, name, shape):
        rows, cols = shape
        groups = _group_of(cols, group)
        codes = rng.integers(0, 16, shape)
        zeros = rng.integers(0, 16, (rows, groups.max() + 1))
        scales = _scales(rng, zeros.shape, np.float16)
        module = name.removesuffix(".weight")
        stored = {
            module + ".qweight": packed(codes.T),
            module + ".qzeros": packed(zeros.T),
            module + ".scales": scales.T,
        }
        return stored, _values(codes, zeros, scales, groups)

    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group or -1,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["gate"],
    }
    return Format(section, pack, "float16")


def gptq(bits=4, group=GROUP, order=False, version=1) -> Format:
    def pack(rng, name, shape):
        rows, cols = shape
        groups = _group_of(cols, group)
        if order:
            groups = rng.permutation(groups)
        codes = rng.integers(0, 1 << bits, shape)
        zeros = rng.integers(1, 1 << bits, (rows, groups.max() + 1))
        scales = _scales(rng, zeros.shape, np.float16)
        module = name.removesuffix(".weight")
        stored = {
            module + ".qweight": words(codes.T, bits, 0),
            module + ".qzeros": words(zeros.T - (version == 1), bits, 1),
            module + ".scales": scales.T,
            module + ".g_idx": groups.astype(np.int32),
        }
        return stored, _values(codes, zeros, scales, groups)

    section = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": order,
        "sym": False,
        "damp_percent": 0.1,
        "true_sequential": True,
    } | ({} if version == 1 else {"checkpoint_format": "gptq_v2"})
    return Format(section, pack, "float16")


def eight_bits(
    section, grid, suffix="_scale", kind=ml_dtypes.float8_e4m3fn, zeros=False, **more
) -> Format:
    """FP8 or INT8 times scales.

    Args:
      grid: shape of the weight -> (rows and columns of a block, shape of a matrix's
        scales).
    """

    def pack(rng, name, shape):
        block_rows, block_cols, stated = grid(shape)
        rows, cols = shape[-2:]
        if kind == np.int8:
            weight = rng.integers(-128, 128, shape).astype(np.int8)
        else:
            weight = rng.standard_normal(shape, np.float32).astype(kind)
        lead = shape[:-2]
        small = (*lead, -(-rows // block_rows), -(-cols // block_cols))
        scales = _scales(rng, small, more.get("dtype", np.float32))
        less = np.zeros(small, np.int8)
        stored = {name: weight, name + suffix: scales.reshape((*lead, *stated))}
        if zeros:
            less = rng.integers(-9, 9, small).astype(np.int8)
            stored[name + "_zero_point"] = less.reshape((*lead, *stated))
        if more.get("static"):
            module = name.removesuffix(".weight")
            stored[module + ".input_scale"] = np.ones((), np.float32)
        at = np.ix_(np.arange(rows) // block_rows, np.arange(cols) // block_cols)
        wide = scales.astype(np.float32)[(..., *at)]
        return stored, (weight.astype(np.float32) - less[(..., *at)]) * wide

    return Format(section, pack, fused=more.get("fused", False))


def _in_blocks(shape):
    return *BLOCK, (-(-shape[-2] // BLOCK[0]), -(-shape[-1] // BLOCK[1]))


def _a_row(shape):
    return 1, shape[-1], (shape[-2], 1)


def _a_tensor(shape):
    return *shape[-2:], ()


def _a_half(shape):
    """A scale for packed gates, one for what is packed with them."""
    if len(shape) == 2:
        return _a_tensor(shape)
    return shape[-2] // 2, shape[-1], (2, 1)


def _float_weights(strategy, **more):
    return {"num_bits": 8, "type": "float", "strategy": strategy, **more}


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_BLOCKS = _FP8 | {"weight_block_size": list(BLOCK), "ignored_layers": ["gate"]}
_SQUARE = 128
_SQUARES = _FP8 | {"weight_block_size": [_SQUARE, _SQUARE]}


def _in_squares(shape):
    rows, cols = shape[-2:]
    return _SQUARE, _SQUARE, (-(-rows // _SQUARE), -(-cols // _SQUARE))


# What converting can take over as blocks, and with which sizes: kind -> name -> format.
WIDE = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}
KEPT = {
    "fp8": {
        "blocks": eight_bits(_SQUARES, _in_squares, "_scale_inv"),
        "blocks, packed": eight_bits(_SQUARES, _in_squares, "_scale_inv", fused=True),
        "rows": eight_bits(
            _compressed("float-quantized", _float_weights("channel")),
            _a_row,
            dtype=BFLOAT16,
        ),
    },
    "int4": {
        "groups": pack_quantized(group=32),
        "wide groups": pack_quantized(group=64),
    },
}
FORMATS = {
    "fp8 blocks": eight_bits(_BLOCKS, _in_blocks, "_scale_inv"),
    "fp8 blocks, packed": eight_bits(_BLOCKS, _in_blocks, "_scale_inv", fused=True),
    "fp8 tensor, packed": eight_bits(
        _FP8 | {"weight_block_size": None}, _a_tensor, "_scale_inv", fused=True
    ),
    "fp8 halves, packed": eight_bits(
        _FP8 | {"weight_block_size": None},
        _a_half,
        "_scale_inv",
        fused=True,
    ),
    "fp8 static": eight_bits(
        _FP8 | {"activation_scheme": "static"}, _a_tensor, static=True
    ),
    "fp8 rows": eight_bits(
        _compressed("float-quantized", _float_weights("channel")),
        _a_row,
        dtype=BFLOAT16,
    ),
    "fp8 rows, packed": eight_bits(_FP8, _a_row, fused=True),
    "fp8 compressed blocks": eight_bits(
        _compressed(
            "float-quantized", _float_weights("block", block_structure=list(BLOCK))
        ),
        _in_blocks,
    ),
    "int8 rows": eight_bits(
        _compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        ),
        _a_row,
        kind=np.int8,
        zeros=True,
    ),
    "int4": pack_quantized(),
    "int4 float16": pack_quantized(dtype=np.float16),
    "int4 zeros": pack_quantized(symmetric=False),
    "int4 rows": pack_quantized(group=None, symmetric=False),
    "int4 order": pack_quantized(order=True),
    "int8 groups": pack_quantized(bits=8, symmetric=False),
    "awq": awq(),
    "awq rows": awq(group=None),
    "gptq": gptq(),
    "gptq order": gptq(order=True),
    "gptq rows": gptq(group=None),
    "gptq 8 bits": gptq(bits=8),
    "gptq 2": gptq(version=2),
}


def packed_folder(path, format: Format, seed: int = 3, **sizes):
    """A Qwen3-MoE whose projections are packed; returns the values too, by name."""
    changes = SIZES | sizes | {"quantization_config": format.section}
    raw = raw_config("qwen3_moe", torch_dtype=format.dtype, **changes)
    plain = {name: value for name, value in raw.items() if "quantiz" not in name}
    rng = np.random.default_rng(seed)
    tensors = random_tensors(plain, "float32", seed)
    if format.fused:
        tensors = _fuse(tensors)
    stored, wanted = {}, {}
    for name, array in tensors.items():
        if "_proj" in name:
            parts, wanted[name] = format.pack(rng, name, array.shape)
            stored |= parts
        else:
            stored[name] = array.astype(np.dtype(ml_dtypes.bfloat16))
            if format.dtype == "float16":
                stored[name] = array.astype(np.float16)
            wanted[name] = stored[name].astype(np.float32)
    return write_folder(path, raw, stored), plain, stored, wanted


def _fuse(tensors):
    """Experts of a layer in one tensor, as transformers 5 holds them."""
    fused = {n: a for n, a in tensors.items() if ".experts." not in n}
    heads = sorted({n[: n.index("experts.")] for n in tensors if ".experts." in n})
    for head in heads:
        each = {
            part: np.stack(
                [tensors[f"{head}experts.{e}.{part}_proj.weight"] for e in range(6)]
            )
            for part in ("gate", "up", "down")
        }
        both = np.concatenate([each["gate"], each["up"]], axis=1)
        fused[head + "experts.gate_up_proj"] = both
        fused[head + "experts.down_proj"] = each["down"]
    return fused
