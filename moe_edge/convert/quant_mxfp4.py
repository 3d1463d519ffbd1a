"""MXFP4, as gpt-oss is published: 4-bit floats in groups of 32 with a power of two.

`X_blocks [E, out, G, 16]` holds two values a byte, low nibble first; `X_scales
[E, out, G]` is the exponent of two, biased by 127, of each group. The tensor they stand
for is `X [E, G * 32, out]`.
Source: transformers 5.23, integrations/mxfp4.py.
"""

import numpy as np

from moe_edge.convert.hf_tensors import Stored
from moe_edge.convert.packed_tensor import PackedTensor
from moe_edge.core.checks import CheckpointError
from moe_edge.model.quantised import FP4

BLOCKS, SCALES = "_blocks", "_scales"


def find_mxfp4(files: dict[str, Stored]) -> list[PackedTensor]:
    """The quantised weights among the tensors of a folder."""
    found: list[PackedTensor] = []
    for name in files:
        if not name.endswith(BLOCKS):
            continue
        base = name.removesuffix(BLOCKS)
        scale = base + SCALES
        if scale not in files or base in files:
            raise CheckpointError(
                f"{name} needs exactly {scale} next to it, and no {base}"
            )
        parts = {"blocks": files[name], "scales": files[scale]}
        found.append(_Mxfp4Tensor(base, parts))
    return found


class _Mxfp4Tensor(PackedTensor):
    """One packed tensor of all experts of a layer."""

    def _checked_shape(self):
        blocks = tuple(self.parts["blocks"].shape)
        if len(blocks) != 4 or blocks[3] != 16:
            raise CheckpointError(
                f"{self.name} has MXFP4 blocks of shape {blocks}, expected "
                "[E, out, groups, 16]"
            )
        scales = tuple(self.parts["scales"].shape)
        if scales != blocks[:3]:
            raise CheckpointError(
                f"{self.name} has MXFP4 scales {scales} for blocks {blocks}"
            )
        E, rows, groups, width = blocks
        return E, groups * width * 2, rows

    def read(self, dtype, expert=None):
        if expert is None:
            return np.stack([self.read(dtype, e) for e in range(self.shape[0])])
        blocks, scales = self._array("blocks", expert), self._array("scales", expert)
        return dequantize(blocks, scales, dtype).T


def dequantize(blocks: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
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
