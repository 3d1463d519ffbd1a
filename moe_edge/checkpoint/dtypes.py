"""The dtypes weights are stored in, and casting between them."""

import ml_dtypes
import numpy as np

from moe_edge.model.quantised import STORED_KINDS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WEIGHT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
}
# What a manifest may call the experts' records: quantised ones are rows of bytes.
RECORD_DTYPES = WEIGHT_DTYPES | dict.fromkeys(STORED_KINDS, np.dtype(np.uint8))
# Stays float32 where it is stored so, whatever the rest is cast to: transformers
# keeps it (DeepSeek-V3's _keep_in_fp32_modules_strict).
KEEP_FLOAT32 = ("router.correction_bias",)
_BLOCK = 1 << 17  # elements looked at together: stays in the cache


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in `dtype`; itself if it already is. Overflow becomes infinity."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def cast_dense(name: str, array: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    """Casts a dense tensor by canonical name, but for those kept in float32."""
    if dtype is None or (name in KEEP_FLOAT32 and array.dtype == np.float32):
        return array
    return cast(array, dtype)


def all_finite(array: np.ndarray) -> bool:
    """Whether a C-contiguous float array holds no NaN or infinity.

    Compares the bits without their sign against infinity's, several times faster
    than isfinite on 2-byte floats.
    """
    bits = np.dtype(f"u{array.dtype.itemsize}")
    infinity = np.array(np.inf, array.dtype).view(bits)
    mask = bits.type(np.iinfo(bits).max >> 1)
    flat = array.reshape(-1).view(bits)
    scratch = np.empty(min(_BLOCK, flat.size), bits)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        magnitude = np.bitwise_and(block, mask, out=scratch[: block.size])
        if magnitude.max() >= infinity:
            return False
    return True
