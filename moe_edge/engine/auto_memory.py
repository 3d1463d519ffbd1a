"""`device_memory auto`: what nobody holds of the device, less a reserve."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_edge.core.checks import ConfigError
from moe_edge.engine.devices import SPARE_SHARE
from moe_edge.engine.load import allow_pinned
from moe_edge.engine.offload_options import OffloadOptions

if TYPE_CHECKING:
    import jax

AUTO = "auto"


def auto_memory(
    reader, homes: "Sequence[jax.Device]" = (), has_records: bool = False
) -> str:
    """Nine tenths of what the device has free, as a size; on a CPU the records of the
    experts live there, too.

    Args:
      reader: an open checkpoint.
      homes: devices that hold experts; none: the first alone. The size is of each.
      has_records: whether the host holds the records already.
    Raises:
      ConfigError: the device does not say what it has.
    """
    # Before JAX says what is free; what mode fused would pin is the most.
    allow_pinned(reader, OffloadOptions(mode="fused"))
    import jax

    from moe_edge.engine.device_memory import free_device_bytes
    from moe_edge.offload.store import widened

    devices = homes or (None,)
    known = [free for free in map(free_device_bytes, devices) if free is not None]
    if len(known) < len(devices):
        raise ConfigError(
            "device_memory is 'auto', and the device does not say what it has; "
            "give a size (2GiB) or a share (25%)"
        )
    free, config = min(known), reader.config
    if jax.default_backend() == "cpu" and not has_records and config.moe_layers:
        blocks = len(config.moe_layers) * config.moe.num_experts
        free -= blocks * reader.layout.num_bytes(widened(reader.dtype))
    if jax.default_backend() == "cpu":  # whose devices are one memory
        free //= len(devices)
    return f"{max(1, int(free * (1 - SPARE_SHARE)))}B"
