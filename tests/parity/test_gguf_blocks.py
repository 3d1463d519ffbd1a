"""The bytes of quantised blocks are those of GGUF's own package."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("gguf") is None:
    pytest.skip("needs the extra `gguf`", allow_module_level=True)

from gguf import GGMLQuantizationType, quants

from moe_edge.model.quantised import KINDS, decode
from moe_edge.model.quantising import encode
from tests.support.block_formats import many_weights

pytestmark = pytest.mark.parity
TYPES = {kind: GGMLQuantizationType[kind.upper()] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_equal_gguf(kind):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(20_000, 96)).astype(np.float32)
    some = many_weights()
    if kind == "mxfp4":
        some += 0.0  # -0 stays -0 with us
    for weights in (some, noise):
        stored = encode(kind, weights)
        np.testing.assert_array_equal(stored, quants.quantize(weights, TYPES[kind]))
        want = quants.dequantize(stored, TYPES[kind])
        np.testing.assert_array_equal(decode(kind, stored), want)
