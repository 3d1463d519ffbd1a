"""Dequantises the two quantised formats that published MoE files come in.

Block FP8 (DeepSeek-V3): `W [rows, cols]` in float8 e4m3 with `W_scale_inv`, one
scale per block of `weight_block_size`; the value is W x scale.
MXFP4 (gpt-oss): `X_blocks [E, out, G, 16]` holds two 4-bit floats a byte, low nibble
first; `X_scales [E, out, G]` is a power-of-two exponent biased by 127 for each group
of 32. The tensor they stand for is `X [E, G * 32, out]`.
Source: transformers 5.23, integrations/finegrained_fp8.py and mxfp4.py.
"""

import json
from typing import Any

import ml_dtypes
import numpy as np

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.model.quantised import FP4

SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
FP8_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_FP8_FIELDS = {
    *("quant_method", "weight_block_size", "activation_scheme", "fmt", "scale_fmt"),
    *("modules_to_not_convert", "ignored_layers", "dequantize"),
}
_MXFP4_FIELDS = {"quant_method", "modules_to_not_convert", "dequantize"}


def quantization(raw: dict[str, Any]) -> tuple[str | None, tuple[int, int] | None]:
    """The method a config.json declares: (None | "fp8" | "mxfp4", FP8 block size).

    Raises:
      ConfigError: any other method, or FP8 without blocks.
    """
    section = raw.get("quantization_config")
    if section is None:
        return None, None
    method = section.get("quant_method") if isinstance(section, dict) else None
    known = {"fp8": _FP8_FIELDS, "mxfp4": _MXFP4_FIELDS}
    if method not in known:
        raise ConfigError(
            f"quantization_config has quant_method {method!r}; known: fp8 (blocks), "
            "mxfp4. Convert from an unquantised copy of the model"
        )
    unknown = {
        k: v for k, v in section.items() if k not in known[method] and v is not None
    }
    if unknown:
        raise ConfigError(
            f"quantization_config of {method} has unknown fields "
            f"{json.dumps(unknown)[:120]}"
        )
    if method == "mxfp4":
        return method, None
    block = section.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or any(type(n) is not int or n < 1 for n in block)
    ):
        raise ConfigError(
            f"quantization_config.weight_block_size is {block!r}, expected "
            "[rows, cols]; FP8 with one scale per tensor or channel is not supported"
        )
    return method, (block[0], block[1])


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Scales as float32; raw bytes are exponents biased by 127."""
    if scales.dtype == np.uint8:
        return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return scales.astype(np.float32)


def dequantize_fp8(
    weight: np.ndarray, scales: np.ndarray, block: tuple[int, int], dtype: np.dtype
) -> np.ndarray:
    """W x scale of its block, in float32, rounded once to `dtype`.

    Args:
      weight: [rows, cols] float8.
      scales: [ceil(rows / block rows), ceil(cols / block cols)].
    """
    rows, cols = weight.shape
    out = np.empty((rows, cols), dtype)
    scales = scale_values(scales)
    for i, first in enumerate(range(0, rows, block[0])):
        strip = weight[first : first + block[0]].astype(np.float32)
        strip *= np.repeat(scales[i], block[1])[None, :cols]
        with np.errstate(over="ignore"):
            out[first : first + block[0]] = strip.astype(dtype)
    return out


def fp8_scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def dequantize_mxfp4(
    blocks: np.ndarray, scales: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """One expert of a packed tensor, still as [out, in].

    Args:
      blocks: uint8 [out, G, 16].
      scales: uint8 [out, G].
    Returns:
      [out, G * 32]; the HF tensor `[in, out]` is its transpose.
    """
    rows, groups, width = blocks.shape
    values = np.empty((rows, groups, width, 2), np.float32)
    values[..., 0] = FP4[blocks & 15]
    values[..., 1] = FP4[blocks >> 4]
    exponent = scales.astype(np.int32)[..., None, None] - 127
    with np.errstate(over="ignore", under="ignore"):
        values = np.ldexp(values, exponent).astype(dtype)
    return values.reshape(rows, groups * width * 2)


def check_fp8(name: str, weight_shape, scale_shape, block: tuple[int, int]) -> None:
    """Refuses a scale grid that does not belong to the weight.

    The weight is a matrix, or one of each expert.
    """
    experts, matrix = weight_shape[:-2], weight_shape[-2:]
    if len(weight_shape) not in (2, 3) or tuple(scale_shape) != (
        *experts,
        *fp8_scale_shape(matrix, block),
    ):
        raise CheckpointError(
            f"{name} has FP8 scales of shape {tuple(scale_shape)} for a weight "
            f"{tuple(weight_shape)} in blocks of {block}"
        )


def check_mxfp4(name: str, blocks_shape, scales_shape) -> None:
    """Refuses blocks and scales that do not belong together."""
    if len(blocks_shape) != 4 or blocks_shape[3] != 16:
        raise CheckpointError(
            f"{name} has MXFP4 blocks of shape {tuple(blocks_shape)}, expected "
            "[E, out, groups, 16]"
        )
    if tuple(scales_shape) != tuple(blocks_shape[:3]):
        raise CheckpointError(
            f"{name} has MXFP4 scales {tuple(scales_shape)} for blocks "
            f"{tuple(blocks_shape)}"
        )
