"""GGUF's quantised blocks, weight by weight: what the codec is compared with."""

import math
import struct
from pathlib import Path

import numpy as np

from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_checkpoints import hf_folder

BYTES = {"q8_0": 34, "q4_0": 18, "mxfp4": 17}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_slowly(kind: str, stored: np.ndarray) -> np.ndarray:
    """float32 of uint8 `[bytes]`, whole blocks."""
    values = []
    for first in range(0, stored.size, BYTES[kind]):
        block = stored[first : first + BYTES[kind]].tobytes()
        if kind == "mxfp4":
            low, high = [b % 16 for b in block[1:]], [b // 16 for b in block[1:]]
            codes = low + high
            parts = [(FP4[code % 8], 1 - code // 8 * 2) for code in codes]
            values += [math.ldexp(sign * size, block[0] - 127) for size, sign in parts]
            continue
        (scale,) = struct.unpack("<e", block[:2])
        if kind == "q8_0":
            codes = struct.unpack("32b", block[2:])
        else:
            codes = [byte % 16 - 8 for byte in block[2:]]
            codes += [byte // 16 - 8 for byte in block[2:]]
        values += [np.float32(scale) * np.float32(code) for code in codes]
    return np.array(values, np.float32)


def encode_slowly(kind: str, weights: np.ndarray) -> np.ndarray:
    """uint8 of finite float32 `[weights]`, a multiple of 32 of them."""
    stored, zero, one = b"", np.float32(0), np.float32(1)
    for first in range(0, weights.size, 32):
        block = list(weights[first : first + 32].astype(np.float32))
        if kind == "mxfp4":
            stored += _mxfp4_slowly([float(weight) for weight in block])
            continue
        largest = max(block, key=abs)  # of equal ones the first
        end = np.float32(127 if kind == "q8_0" else -8)
        scale = (abs(largest) if kind == "q8_0" else largest) / end
        inverse = zero if scale == 0 else one / scale
        shares = [weight * inverse for weight in block]
        stored += struct.pack("<e", np.float16(scale))
        if kind == "q8_0":
            # Halves away from zero.
            codes = [int(np.sign(s)) * int(abs(float(s)) + 0.5) for s in shares]
            stored += struct.pack("32b", *codes)
        else:
            codes = [min(15, int(s + np.float32(8.5))) for s in shares]
            pairs = zip(codes[:16], codes[16:], strict=True)
            stored += bytes(low + 16 * high for low, high in pairs)
    return np.frombuffer(stored, np.uint8)


def _mxfp4_slowly(block: list[float]) -> bytes:
    largest = max(map(abs, block))
    power = max(math.frexp(largest)[1] - 3, -127) if largest else -127
    codes = []
    for weight in block:
        share = abs(weight) / 2.0**power
        nearest = min(range(8), key=lambda n: (abs(FP4[n] - share), n))
        below = math.copysign(1, weight) < 0 and (nearest > 0 or weight == 0)
        codes.append(nearest + 8 * below)
    pairs = zip(codes[:16], codes[16:], strict=True)
    return bytes([power + 127, *(low + 16 * high for low, high in pairs)])


def many_weights(rows: int = 12, width: int = 96) -> np.ndarray:
    """float32 `[rows, width]` with ties, zeros, tiny and large blocks."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(rows, width)).astype(np.float32)
    weights[1] = np.round(weights[1] * 8) / 8
    weights[2] = rng.integers(-254, 255, width) / 2  # halves between q8_0's codes
    weights[2, ::32] = 127
    weights[3] = rng.integers(-16, 16, width) / 2  # and q4_0's
    weights[3, ::32] = -8
    weights[4] = 0
    weights[5, :32], weights[5, 32:] = -0.0, 1e-7  # a scale that float16 rounds away
    weights[6] *= 1e4
    weights[7] = np.abs(weights[7])
    return weights


def whole_blocks_folder(folder: Path, **changes) -> Path:
    """A tiny HF folder with a tokenizer, whose experts blocks of 32 weights fill."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "vocab_size": 320}
    path = hf_folder(folder, "qwen2_moe", **sizes | changes)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return path
