"""Programs of a CPU that run in the thread that calls them.

JAX hands a CPU's programs to a thread of its own, so that the caller may go on. An
engine that reads every layer's routing has nothing to go on with: it pays for two
threads that wake up, 160 us a layer on two cores of a Xeon (docs/measurements.md).
"""

import jax

from moe_edge.kernels import native

# What a host takes between two layers, and a short wait for blocks. Nobody else wants
# the cores meanwhile, as the caller is one of the threads that compute.
SPIN_US = 1000


def run_inline() -> None:
    """From here on, if nothing has run on this process's CPU yet; else nothing changes.

    A resident engine of the same process then begins no step ahead. The kernels' other
    threads stay awake between two layers in any case.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if native.choice() == "native":
        native.spin(SPIN_US)
