"""Weights of 8 bits times scales: FP8 of two methods, and INT8.

`W [rows, cols]`, or `[E, rows, cols]` of packed experts, is float8 or int8. The value
is `(W - zero) * scale`, of which only INT8 may have a zero. One scale belongs to the
whole weight, to a row ("channel"), to a group of columns in a row, or to a block of
rows and columns; DeepSeek-V3 and those after it call it `W_scale_inv`,
`compressed-tensors` and vLLM `W_scale`. How activations are rounded (dynamic, or by
stored scales) is not followed: the weights are dequantised and multiplied as they are.
Source: transformers 5.24, integrations/finegrained_fp8.py; compressed-tensors 0.20,
compressors/naive_quantized.
"""

import functools
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moe_edge.convert.hf_tensors import Stored
from moe_edge.convert.packed_tensor import FLOATS, PackedTensor, rounded, strips
from moe_edge.core.checks import CheckpointError
from moe_edge.model.quantised import BLOCK_BYTES, block_of

FP8_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
INT8 = np.dtype(np.int8)
_BYTE = np.dtype(np.uint8)
_POWERS = (np.dtype(ml_dtypes.float8_e8m0fnu), _BYTE)
_SCALES_OF_FP8 = (*FLOATS, *_POWERS)
SCALES = ("_scale_inv", "_scale")
ZERO = "_zero_point"
_OF_ACTIVATIONS = re.compile(
    r"[._](?:input|output|activation|k|v|q)_(?:scale|zero_point)$"
)


class Blocks(NamedTuple):
    """How many rows and columns share a scale; None: all."""

    rows: int | None = None
    cols: int | None = None

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """How many scales a weight has."""
        down, across = self.rows or rows, self.cols or cols
        return -(-rows // max(1, down)), -(-cols // max(1, across))


TENSOR, CHANNEL = Blocks(), Blocks(1)


def why_unread(name: str) -> str | None:
    """Why a tensor of a folder with 8-bit weights is left out, if it is."""
    if _OF_ACTIVATIONS.search(name):
        return "how activations are rounded, which is not followed"
    return None


def find_scaled(
    files: dict[str, Stored], dtypes: tuple[np.dtype, ...], blocks_of
) -> list[PackedTensor]:
    """The 8-bit weights among the tensors of a folder.

    Args:
      dtypes: of the weights that count.
      blocks_of: the weight's name -> the `Blocks` that its scales may have.
    Raises:
      CheckpointError: one without its scales, or with a grid that is not its own.
    """
    found: list[PackedTensor] = []
    inverse, plain = SCALES
    for name, stored in files.items():
        dtype = stored.dtype
        if dtype is not None and (dtype not in dtypes or name.endswith(ZERO)):
            continue
        scale, other = files.get(name + inverse), files.get(name + plain)
        if scale is None or other is not None:
            if scale is None and other is None and dtype is None:
                continue
            scale = _only_scale(name, dtype, scale, other)
        parts = {"weight": stored, "scale": scale}
        if name + ZERO in files:
            parts["zero"] = files[name + ZERO]
        found.append(ScaledTensor(name, parts, blocks_of(name)))
    return found


def _only_scale(name: str, dtype: np.dtype | None, *scales: Stored | None) -> Stored:
    """The one of a weight's scales that is there."""
    names = [name + suffix for suffix in SCALES]
    there = [each for each, scale in zip(names, scales, strict=True) if scale]
    kind = "INT8" if dtype == INT8 else "FP8"
    if not there:
        raise CheckpointError(f"{kind} tensor {name} lacks its {' or '.join(names)}")
    if len(there) > 1:
        raise CheckpointError(
            f"{kind} tensor {name} has {' and '.join(there)}, expected one of them"
        )
    return next(scale for scale in scales if scale)


@functools.cache
def _fitting(
    known: tuple[Blocks, ...], shape: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[Blocks | None, str]:
    """Which blocks such scales are of, and the shapes that are expected of them."""
    lead, grid = shape[:-2], scales[len(shape[:-2]) :]
    grid = (*grid, 1, 1)[:2] if len(grid) < 2 else grid
    if lead and TENSOR in known:  # of packed gate and up each half has its own
        known = (*known, Blocks(max(1, shape[-2] // 2)))
    fitting = [b for b in known if grid == b.grid(*shape[-2:])]
    expected = " or ".join(str((*lead, *b.grid(*shape[-2:]))) for b in known)
    fits = scales[: len(lead)] == lead and fitting
    return (fitting[0] if fits else None), expected


class ScaledTensor(PackedTensor):
    """One 8-bit weight, or one of each expert."""

    def __init__(self, name: str, parts: dict[str, Stored], blocks: tuple[Blocks, ...]):
        self._known, self._blocks = blocks, blocks[0]
        super().__init__(name, parts)

    def _checked_shape(self):
        dtype, shape, _ = self.parts["weight"].entry
        of_scales, scales, _ = self.parts["scale"].entry
        kind, allowed = ("INT8", FLOATS) if dtype == INT8 else ("FP8", _SCALES_OF_FP8)
        if len(shape) not in (2, 3) or self.name.endswith("bias"):
            raise CheckpointError(
                f"{self.name} is {kind} of shape {shape}, expected a matrix, or one of "
                "each expert; copy the file again"
            )
        self._blocks, expected = _fitting(self._known, shape, scales)
        if self._blocks is None:
            raise CheckpointError(
                f"{self.name} has {kind} scales of shape {scales} for a weight {shape}"
                f", expected {expected}; copy the file again"
            )
        if of_scales not in allowed:
            self._check("scale", scales, allowed)
        if "zero" in self.parts:
            self._check("zero", scales, (INT8,))
        return shape

    def read(self, dtype, expert=None):
        if expert is None and len(self.shape) == 3:
            return np.stack([self.read(dtype, e) for e in range(self.shape[0])])
        rows, cols = self.shape[-2:]
        block = (self._blocks.rows or rows, self._blocks.cols or cols)
        grid = self._blocks.grid(rows, cols)
        scales = scale_values(self._array("scale", expert)).reshape(grid)
        zeros = None
        if "zero" in self.parts:
            zeros = self._array("zero", expert).astype(np.float32).reshape(grid)
        return dequantize(self._array("weight", expert), scales, block, dtype, zeros)

    def why_not_kept(self, kind):
        rows, cols = self.shape[-2:]
        across, dtype = self._blocks.cols or cols, self.parts["weight"].dtype
        if kind != "fp8" or dtype != FP8_DTYPES[0] or "zero" in self.parts:
            return f"its codes are {dtype.name}, expected {FP8_DTYPES[0].name}"
        if across % (block := block_of(kind)) and across < cols:
            return f"{across} columns share a scale, expected a multiple of {block}"
        return None

    def blocks(self, kind, expert=None):
        rows, cols = self.shape[-2:]
        down, across = self._blocks.rows or rows, self._blocks.cols or cols
        codes = self._array("weight", expert).view(np.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            raise CheckpointError(
                f"tensor {self.name} has NaN among its FP8 codes; get an undamaged copy"
            )
        grid = self._blocks.grid(rows, cols)
        scales = scale_values(self._array("scale", expert)).reshape(grid)
        block = block_of(kind)
        each = scales[np.arange(rows) // down][:, np.arange(0, cols, block) // across]
        stored = np.empty((rows, cols // block, BLOCK_BYTES[kind]), np.uint8)
        stored[..., :4] = each.astype("<f4")[..., None].view(np.uint8)
        stored[..., 4:] = codes.reshape(rows, -1, block)
        return stored.reshape(rows, -1)


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Scales as float32; raw bytes are exponents biased by 127."""
    if scales.dtype == _BYTE:
        return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return scales.astype(np.float32)


def dequantize(
    weight: np.ndarray,
    scales: np.ndarray,
    block: tuple[int, int],
    dtype: np.dtype,
    zeros: np.ndarray | None = None,
) -> np.ndarray:
    """(W - zero) * scale of its block, in float32, rounded once to `dtype`.

    Args:
      weight: [rows, cols] float8 or int8.
      scales: float32 [ceil(rows / block rows), ceil(cols / block cols)].
      zeros: float32 of the same shape; None: 0.
    """
    rows, cols = weight.shape
    out = np.empty((rows, cols), dtype)
    for first, last in strips(rows, cols):
        at = np.arange(first, last) // block[0]
        strip = weight[first:last].astype(np.float32)
        if zeros is not None:
            strip -= np.repeat(zeros[at], block[1], axis=1)[:, :cols]
        strip *= np.repeat(scales[at], block[1], axis=1)[:, :cols]
        out[first:last] = rounded(strip, dtype)
    return out
