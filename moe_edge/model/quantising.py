"""Rounds weights to blocks (`quantised.py`), as GGUF's reference does.

So both make the same bytes of the same weights (its Python package `gguf`, quants.py).
"""

import numpy as np

from moe_edge.model.quantised import (
    BLOCK,
    FP4,
    format_of,
    interleave,
    is_interleaved,
    row_bytes,
)

_BETWEEN = (FP4[1:8] + FP4[:7]) / 2  # of the codes without a sign


def encode(kind: str, weights: np.ndarray) -> np.ndarray:
    """uint8 of `stored_shape` of float32 `[..., O, I]`, or `[..., I]`; of NumPy only.

    Args:
      kind: one of KINDS, or such a one interleaved.

    A scale that float16 cannot hold becomes infinity. Of mxfp4 a weight of -0 stays
    one, which the reference makes 0.
    """
    if is_interleaved(kind):
        return interleave(format_of(kind), encode(format_of(kind), weights))
    width = row_bytes(kind, weights.shape[-1])
    blocks = np.asarray(weights, np.float32).reshape(-1, BLOCK)
    with np.errstate(all="ignore"):  # a block of zeros, or of NaN
        scales, codes = _ENCODERS[kind](blocks)
    rows = np.concatenate([scales.view(np.uint8), codes], axis=1)
    return rows.reshape(*weights.shape[:-1], width)


def _inverse(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _encode_q8_0(blocks: np.ndarray):
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    shares = blocks * _inverse(scales)
    # To the nearest whole number, halves away from zero.
    size = np.abs(shares)
    whole = np.floor(size)
    codes = np.sign(shares) * (whole + np.floor(2 * (size - whole)))
    return scales.astype("<f2"), codes.astype(np.int8).view(np.uint8)


def _encode_q4_0(blocks: np.ndarray):
    # The weight of largest magnitude becomes -8, the end of the codes' range.
    at = np.abs(blocks).argmax(axis=1)[:, None]
    scales = np.take_along_axis(blocks, at, axis=1) / np.float32(-8)
    shares = blocks * _inverse(scales) + np.float32(8.5)
    codes = np.trunc(shares).astype(np.uint8).clip(0, 15)
    return scales.astype("<f2"), _in_halves(codes)


def _encode_mxfp4(blocks: np.ndarray):
    # The weight of largest magnitude becomes 4 to 6. Weights that are of the format
    # stay what they are, also if their block had a larger scale than it needs.
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    exponents = np.where(largest > 0, np.frexp(largest)[1] - 3 + 127, 0)
    exponents = exponents.clip(0, 254).astype(np.uint8)
    shares = np.ldexp(np.abs(blocks), 127 - exponents.astype(np.int32))
    codes = np.searchsorted(_BETWEEN, shares.reshape(-1)).reshape(blocks.shape)
    is_negative = np.signbit(blocks) & ((codes > 0) | (blocks == 0))
    return exponents, _in_halves((codes + 8 * is_negative).astype(np.uint8))


def _in_halves(codes: np.ndarray) -> np.ndarray:
    """Bytes [N, 16] of 4-bit codes [N, 32]."""
    return codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)


_ENCODERS = {"q8_0": _encode_q8_0, "q4_0": _encode_q4_0, "mxfp4": _encode_mxfp4}
