"""Tensor types of GGUF files: how many bytes, and what they decode to.

Q8_0, Q4_0 and MXFP4 are the formats of `model/quantised.py`, and may stay what they
are; those of `gguf_k_quants.py` are decoded only.
"""

from typing import NamedTuple

import numpy as np

from moe_edge.checkpoint.dtypes import BFLOAT16, cast
from moe_edge.convert import gguf_k_quants
from moe_edge.model import quantised


class Kind(NamedTuple):
    """A tensor type that is read."""

    values: int  # weights of a block
    size: int  # its bytes
    dtype: np.dtype  # the narrowest that holds every decoded weight


KINDS = {
    "F32": Kind(1, 4, np.dtype(np.float32)),
    "F16": Kind(1, 2, np.dtype(np.float16)),
    "BF16": Kind(1, 2, BFLOAT16),
    "Q8_0": Kind(32, quantised.BLOCK_BYTES["q8_0"], np.dtype(np.float32)),
    "Q4_0": Kind(32, quantised.BLOCK_BYTES["q4_0"], np.dtype(np.float32)),
    "MXFP4": Kind(32, quantised.BLOCK_BYTES["mxfp4"], BFLOAT16),
}
KINDS |= {
    name: Kind(
        256 if layout.itemsize > 32 else 32, layout.itemsize, np.dtype(np.float32)
    )
    for name, layout in gguf_k_quants.LAYOUTS.items()
}
# By the number in the file; those not in KINDS are refused by name.
NAMES = dict(enumerate("F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1".split()))
NAMES |= dict(enumerate("Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS".split(), 10))
NAMES |= dict(enumerate("IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS".split(), 18))
NAMES |= dict(enumerate("I8 I16 I32 I64 F64 IQ1_M BF16".split(), 24))
NAMES |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}

_AT_ONCE = 4096  # blocks


def is_quantised(kind: str) -> bool:
    return KINDS[kind].values > 1


def decode(kind: str, raw: np.ndarray) -> np.ndarray:
    """The weights of some whole blocks, exactly, in the type's dtype.

    Args:
      raw: uint8, flat.
    """
    values, size, dtype = KINDS[kind]
    if not is_quantised(kind):
        return raw.view(dtype)
    blocks_N8 = raw.reshape(-1, size)
    decoded_NV = np.empty((len(blocks_N8), values), dtype)
    # Few blocks at a time: what is computed on the way stays small.
    for first in range(0, len(blocks_N8), _AT_ONCE):
        some = blocks_N8[first : first + _AT_ONCE]
        if kind in gguf_k_quants.LAYOUTS:
            found = gguf_k_quants.decode(kind, some)
        else:
            found = quantised.decode(kind.lower(), some)
        decoded_NV[first : first + _AT_ONCE] = cast(found, dtype)
    return decoded_NV.reshape(-1)
