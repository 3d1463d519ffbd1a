"""Blocks of GGUF files that are decoded and never kept: Q4_1, Q5, K-quants, IQ4.

A block is one record of LAYOUTS. Codes of few bits lie in runs of bytes: the lowest
bits of all bytes of a run are its first codes, then the next bits. "High" fields hold
what the codes' lower bits leave out. Of a K-quant, 256 weights share a float16 scale,
and each 16 or 32 of them a factor of 4 to 8 bits:

  Q4_1, Q5_1     d * q + m
  Q5_0           d * (q - 16)
  Q2_K           d * factor * q - minimum * factor_of_minimum, q of 2 bits
  Q4_K, Q5_K     the same, with q of 4 or 5 bits
  Q3_K           d * (factor - 32) * (q - 4)
  Q6_K           d * factor * (q - 32)
  IQ4_NL         d * LEVELS[q]
  IQ4_XS         d * (factor - 32) * LEVELS[q]

Source: block_q4_1 and the others in ggml-common.h of github.com/ggml-org/ggml. Results
are those of its package `gguf`, bit for bit: products are taken in the same order.
"""

from collections.abc import Callable

import numpy as np

LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.float32,
)
_HALF, _BYTE = "<f2", np.uint8
LAYOUTS = {
    "Q4_1": [("d", _HALF), ("m", _HALF), ("low", _BYTE, 16)],
    "Q5_0": [("d", _HALF), ("high", _BYTE, 4), ("low", _BYTE, 16)],
    "Q5_1": [("d", _HALF), ("m", _HALF), ("high", _BYTE, 4), ("low", _BYTE, 16)],
    "Q2_K": [("factors", _BYTE, 16), ("low", _BYTE, 64), ("d", _HALF), ("m", _HALF)],
    "Q3_K": [
        *[("high", _BYTE, 32), ("low", _BYTE, 64), ("factors", _BYTE, 12)],
        ("d", _HALF),
    ],
    "Q4_K": [("d", _HALF), ("m", _HALF), ("factors", _BYTE, 12), ("low", _BYTE, 128)],
    "Q5_K": [
        *[("d", _HALF), ("m", _HALF), ("factors", _BYTE, 12)],
        *[("high", _BYTE, 32), ("low", _BYTE, 128)],
    ],
    "Q6_K": [
        *[("low", _BYTE, 128), ("high", _BYTE, 64), ("factors", np.int8, 16)],
        ("d", _HALF),
    ],
    "IQ4_NL": [("d", _HALF), ("low", _BYTE, 16)],
    "IQ4_XS": [
        *[("d", _HALF), ("high", _BYTE, 2), ("factors", _BYTE, 4)],
        ("low", _BYTE, 128),
    ],
}
LAYOUTS = {kind: np.dtype(fields) for kind, fields in LAYOUTS.items()}


def decode(kind: str, blocks_N8: np.ndarray) -> np.ndarray:
    """float32 `[blocks, weights of a block]`, exactly.

    Args:
      kind: one of LAYOUTS.
      blocks_N8: uint8 `[blocks, bytes of a block]`, contiguous.
    """
    block_N = blocks_N8.view(LAYOUTS[kind])[:, 0]
    with np.errstate(invalid="ignore", over="ignore"):  # a scale of infinity
        return _DECODERS[kind](block_N).reshape(len(block_N), -1)


def _codes(bytes_N8: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Codes [N, weights] of some bits in bytes [N, ...], in runs of `run` bytes."""
    runs = bytes_N8.reshape(len(bytes_N8), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = (runs >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(bytes_N8), -1)


def _float(block_N: np.ndarray, name: str) -> np.ndarray:
    """A number of each block, float32 [N, 1]."""
    return block_N[name].astype(np.float32)[:, None]


def _scaled(scales_NG: np.ndarray, values_NV: np.ndarray) -> np.ndarray:
    """Values [N, G, V / G] times the scale of their group."""
    grouped = values_NV.astype(np.float32).reshape(*scales_NG.shape, -1)
    grouped *= scales_NG[..., None]
    return grouped


def _five_bits(block_N):
    return _codes(block_N["low"], 4, 16) | (_codes(block_N["high"], 1, 1) << 4)


def _q4_1(block_N):
    values = _float(block_N, "d") * _codes(block_N["low"], 4, 16)
    return values + _float(block_N, "m")


def _q5_0(block_N):
    return _float(block_N, "d") * (_five_bits(block_N).astype(np.int8) - np.int8(16))


def _q5_1(block_N):
    return _float(block_N, "d") * _five_bits(block_N) + _float(block_N, "m")


def _less_minimum(block_N, factors_NG, minima_NG, codes_NV):
    """d * factor * q - minimum * its factor."""
    values = _scaled(_float(block_N, "d") * factors_NG, codes_NV)
    values -= (_float(block_N, "m") * minima_NG)[..., None]
    return values


def _q2_k(block_N):
    factors = block_N["factors"]
    return _less_minimum(
        block_N, factors & 15, factors >> 4, _codes(block_N["low"], 2, 32)
    )


def _q3_k(block_N):
    low, high = block_N["factors"][:, :8], block_N["factors"][:, 8:]
    factors = (_codes(low, 4, 8) | (_codes(high, 2, 4) << 4)).astype(np.int8)
    codes = _codes(block_N["low"], 2, 32) | (_codes(block_N["high"], 1, 32) << 2)
    return _scaled(
        _float(block_N, "d") * (factors - np.int8(32)), codes.astype(np.int8) - 4
    )


def _six_bits(block_N) -> tuple[np.ndarray, np.ndarray]:
    """The factors of scales and of minima of Q4_K and Q5_K, [N, 8] each.

    Twelve bytes hold them: of four factors of scales, six bits; of four of minima, six
    bits; of the others their low halves, scales' and minima's in one byte; their upper
    two bits are the upper two of the first eight bytes.
    """
    scales, minima, rest = np.split(block_N["factors"], 3, axis=1)
    return (
        np.concatenate([scales & 63, (rest & 15) | (scales >> 6 << 4)], axis=1),
        np.concatenate([minima & 63, (rest >> 4) | (minima >> 6 << 4)], axis=1),
    )


def _q4_k(block_N):
    return _less_minimum(block_N, *_six_bits(block_N), _codes(block_N["low"], 4, 32))


def _q5_k(block_N):
    codes = _codes(block_N["low"], 4, 32) | (_codes(block_N["high"], 1, 32) << 4)
    return _less_minimum(block_N, *_six_bits(block_N), codes)


def _q6_k(block_N):
    codes = _codes(block_N["low"], 4, 64) | (_codes(block_N["high"], 2, 32) << 4)
    return _scaled(
        _float(block_N, "d") * block_N["factors"], codes.astype(np.int8) - 32
    )


def _iq4_nl(block_N):
    return _float(block_N, "d") * LEVELS[_codes(block_N["low"], 4, 16)]


def _iq4_xs(block_N):
    factors = _codes(block_N["factors"], 4, 1) | (_codes(block_N["high"], 2, 1) << 4)
    return _scaled(
        _float(block_N, "d") * (factors.astype(np.int8) - np.int8(32)),
        LEVELS[_codes(block_N["low"], 4, 16)],
    )


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
