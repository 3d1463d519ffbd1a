"""What tests of the host kernels share."""

import jax
import numpy as np
import pytest

from moe_edge.kernels import native

needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler when the package was installed"
)


def host_device() -> jax.Device:
    """The CPU; a test that asks for it is skipped where JAX_PLATFORMS leaves it out."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        pytest.skip("JAX_PLATFORMS leaves the CPU out; let it say cuda,cpu")


def stored(values: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Weights as they are stored, and the float64 values that they hold."""
    if dtype == np.float32:
        return values, values.astype(np.float64)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
