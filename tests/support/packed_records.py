"""Records in blocks of few bits, in eights of rows, of random codes: for tests."""

import numpy as np

from moe_edge.kernels import eights
from moe_edge.model import quantised
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import E, make_case

KINDS = tuple(eights.FORMATS)


def layout_of(kind: str, has_bias: bool = False) -> RecordLayout:
    """Widths that fill no whole round of a warp's lanes."""
    sizes = (128, 256) if kind == "fp8x8" else (96, 160)
    return RecordLayout(*sizes, has_bias, kind)


def codes_of(layout: RecordLayout, count: int, seed: int = 0) -> np.ndarray:
    """Records of random codes, all of them; scales near .01 and some zero."""
    random = np.random.default_rng(seed)
    plain, size = layout.kind.removesuffix("x8"), quantised.SCALE_BYTES[layout.kind]
    records_ER = random.integers(0, 256, (count, layout.size), np.uint8)
    for name, shape in layout.shapes.items():
        start, bytes_ = layout.offsets[name], layout.count(shape)
        if len(shape) == 1:
            values = 0.1 * random.standard_normal((count, *shape)).astype(np.float32)
            records_ER[:, start : start + bytes_] = values.view(np.uint8)
            continue
        width = quantised.BLOCK_BYTES[plain]
        rows = records_ER[:, start : start + bytes_].reshape(count, shape[0], -1, width)
        scale = 0.01 * random.random((*rows.shape[:3], 1), np.float32)
        scale[random.random(scale.shape) < 0.1] = 0
        if plain in ("q8_0", "q4_0"):
            rows[..., :size] = scale.astype(np.float16).view(np.uint8)
        elif plain == "mxfp4":
            rows[..., :size] = random.integers(117, 122, scale.shape, np.uint8)
        else:
            rows[..., :size] = scale.view(np.uint8)[..., 4 - size :]
        if plain == "fp8":
            codes = rows[..., size:]
            codes[(codes & 0x7F) == 0x7F] = 0
        whole = rows.reshape(count, shape[0], -1)
        stored = quantised.interleave(plain, whole).reshape(count, -1)
        records_ER[:, start : start + bytes_] = stored
    return records_ER


def case_of(layout: RecordLayout, tokens: int):
    x_TD, ids_TK, weights_TK, _ = make_case(layout, tokens, np.uint8)
    return x_TD, ids_TK, weights_TK, codes_of(layout, E)
