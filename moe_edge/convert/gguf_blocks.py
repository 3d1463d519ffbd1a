"""Tensor types of GGUF files: how many bytes, and what they decode to.

Q8_0, Q4_0 and MXFP4 are the formats of `model/quantised.py`.
"""

from typing import NamedTuple

import numpy as np

from moe_edge.checkpoint.dtypes import BFLOAT16, cast
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
# By the number in the file; those not in KINDS are refused by name.
NAMES = dict(enumerate("F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1".split()))
NAMES |= dict(enumerate("Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS".split(), 10))
NAMES |= dict(enumerate("IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS".split(), 18))
NAMES |= dict(enumerate("I8 I16 I32 I64 F64 IQ1_M BF16".split(), 24))
NAMES |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}


def is_quantised(kind: str) -> bool:
    return KINDS[kind].values > 1


def decode(kind: str, raw: np.ndarray) -> np.ndarray:
    """The weights of some whole blocks, exactly, in the type's dtype.

    Args:
      raw: uint8, flat.
    """
    if not is_quantised(kind):
        return raw.view(KINDS[kind].dtype)
    return cast(quantised.decode(kind.lower(), raw), KINDS[kind].dtype)
