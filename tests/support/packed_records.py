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


def spoiled_case(kind: str):
    """Two tokens, one of them not a number, and experts of which 0 has such a weight.

    Returns:
      (layout, x_TD, slot_TK, experts_ER, whether each of their pairs' rows is NaN).
    """
    layout, size = layout_of(kind), quantised.SCALE_BYTES[kind]
    x_TD, _, _, experts_ER = case_of(layout, 2)
    x_TD[1, 5] = np.nan
    slot_TK = np.array([[0, 1, 2], [1, 3, E]], np.int32)
    if kind == "fp8x8":  # the first code of gate's row 2
        experts_ER[0, 8 * size + 8] = 0xFF
    elif kind != "mxfp4x8":  # which has no NaN: the scale of gate's row 2
        experts_ER[0, 2 * size : 3 * size] = 0xFF
    is_nan_P = np.array([kind != "mxfp4x8", False, False, True, True, False])
    return layout, x_TD, slot_TK, experts_ER, is_nan_P


def check_spoiled(rows_PD, is_nan_P: np.ndarray) -> None:
    """Rows of a `spoiled_case`: whole ones are NaN, and no others have any."""
    rows_PD = np.asarray(rows_PD)
    np.testing.assert_array_equal(np.isnan(rows_PD).all(axis=1), is_nan_P)
    assert np.isfinite(rows_PD[~is_nan_P]).all()
