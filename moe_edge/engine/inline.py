"""Programs of a CPU that run in the thread that calls them.

JAX hands a CPU's programs to a thread of its own, so that the caller may go on. An
engine that reads every layer's routing has nothing to go on with: it pays for two
threads that wake up, 160 us a layer on two cores of a Xeon (docs/measurements.md).
"""

import jax
from jax._src.xla_bridge import backends_are_initialized

from moe_edge.kernels import native

# What a host takes between two layers, and a short wait for blocks. Nobody else wants
# the cores meanwhile, as the caller is one of the threads that compute.
SPIN_US = 1000
_is_inline = False


def run_inline() -> None:
    """From here on, if nothing has run in this process yet; else nothing changes.

    Not for whom the thread of JAX's is of use: a resident engine of the same process
    then gains nothing by beginning a step ahead (decoding the default model takes a
    third longer), and a shadow computes alone.
    """
    global _is_inline
    if not backends_are_initialized():  # later JAX would not notice
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        _is_inline = True


def is_inline() -> bool:
    """Whether `run_inline` came in time."""
    return _is_inline


def stay_awake() -> None:
    """The kernels' other threads spin between two layers, where programs run inline."""
    if _is_inline and native.choice() == "native":
        native.spin(SPIN_US)
