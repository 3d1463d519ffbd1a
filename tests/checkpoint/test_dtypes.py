"""Looking for NaN and infinity by bits; casting."""

import ml_dtypes
import numpy as np
import pytest

from moe_edge.checkpoint.dtypes import WEIGHT_DTYPES, all_finite, cast


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES.values(), ids=str)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_all_finite_finds_one_bad_value_anywhere(dtype, bad):
    array = np.full((3, 100_000), ml_dtypes.finfo(dtype).max, dtype)
    array[1] = -array[1]
    assert all_finite(array)
    for position in ((0, 0), (1, 31_072), (2, 99_999)):
        broken = array.copy()
        broken[position] = bad
        assert not all_finite(broken)
    assert all_finite(array[:0])


def test_cast_overflow_becomes_infinity_silently():
    assert np.isinf(cast(np.array([1e6], np.float32), np.dtype(np.float16)))[0]
    same = np.ones(2, np.float32)
    assert cast(same, np.dtype(np.float32)) is same
