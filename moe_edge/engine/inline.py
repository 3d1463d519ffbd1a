"""Programs of a CPU that run in the thread that calls them.

JAX hands a CPU's programs to a thread of its own, so that the caller may go on. An
engine that reads every layer's routing has nothing to go on with: it pays for two
threads that wake up, 160 us a layer on two cores of a Xeon (docs/measurements.md).
"""

import jax
from jax._src.xla_bridge import backends_are_initialized

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.kernels import native

# As long as a host takes between two layers, and a short wait for blocks. Others may
# want the cores (a server, a thread that copies): members give way.
SPIN_US = 1000
_is_inline = False


def run_inline(offload: OffloadOptions | None = None) -> bool:
    """From here on, unless JAX has started in this process: then nothing changes.

    A resident engine of the same process then begins no step ahead: decoding the
    default model takes 1.3 to 1.6 times as long.

    Args:
      offload: of the engine to come, if that decides: a fused one reads no routing,
        and a shadow gets slower.
    Returns:
      whether it has taken effect now.
    """
    global _is_inline
    if offload is not None and (offload.mode == "fused" or offload.has_shadow):
        return False
    if has_started():  # JAX would not notice
        return False
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    _is_inline = True
    return True


def has_started() -> bool:
    """Whether JAX has opened its devices in this process."""
    return backends_are_initialized()


def is_inline() -> bool:
    """Whether programs of this process run so."""
    return _is_inline and jax.default_backend() == "cpu"


def stay_awake() -> None:
    """The kernels' other threads spin between two layers, where programs run inline."""
    if is_inline() and native.choice() == "native":
        native.spin(SPIN_US)
