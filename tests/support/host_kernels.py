"""What tests of the host kernels share."""

import functools
import platform

import jax
import numpy as np
import pytest

from moe_edge.engine.programs import jit_step
from moe_edge.kernels import native
from moe_edge.model.experts import sum_pair_rows

needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler when the package was installed"
)


def host_device() -> jax.Device:
    """The CPU; a test that asks for it is skipped where JAX_PLATFORMS leaves it out."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        pytest.skip("JAX_PLATFORMS leaves the CPU out; let it say cuda,cpu")


def pair_sums(rows_PD: np.ndarray, weights_TK: np.ndarray) -> np.ndarray:
    """`sum_pair_rows`, rounded as the kernels round that compute now.

    XLA and the kernels both fuse a product and a sum where the processor can. Portable
    ones on x86 do not: they are of processors that cannot (XLA's bits with
    --xla_cpu_max_isa=AVX), and NumPy stands for XLA where this one can.
    """
    if platform.machine() != "x86_64" or ", portable," not in native.describe():
        return np.asarray(jit_step(sum_pair_rows)(rows_PD, weights_TK))
    T, K = weights_TK.shape
    added_KTD = (weights_TK[..., None] * rows_PD.reshape(T, K, -1)).swapaxes(0, 1)
    return functools.reduce(np.add, added_KTD)


def stored(values: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Weights as they are stored, and the float64 values that they hold."""
    if dtype == np.float32:
        return values, values.astype(np.float64)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
