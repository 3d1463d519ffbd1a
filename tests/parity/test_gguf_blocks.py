"""The bytes of q8_0 and q4_0 are those of GGUF's own package."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("gguf") is None:
    pytest.skip("needs the extra `gguf`", allow_module_level=True)

from gguf import GGMLQuantizationType, quants

from moe_edge.model.quantised import KINDS, decode, encode
from tests.support.block_formats import many_weights

pytestmark = pytest.mark.parity
TYPES = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}


@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_equal_gguf(kind):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(20_000, 96)).astype(np.float32)
    for weights in (many_weights(), noise):
        stored = encode(kind, weights)
        np.testing.assert_array_equal(stored, quants.quantize(weights, TYPES[kind]))
        want = quants.dequantize(stored, TYPES[kind])
        np.testing.assert_array_equal(decode(kind, stored), want)
