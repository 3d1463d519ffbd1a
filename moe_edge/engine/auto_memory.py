"""`device_memory auto`: what nobody holds of the device, less a reserve."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_edge.core.checks import CapacityError, ConfigError
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
      has_records: whether the host holds the records already, or never will: they
        stay in their files.
    Raises:
      ConfigError: the device does not say what it has.
      CapacityError: a CPU's memory has no room for copies of the experts.
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
    free, config, copied = min(known), reader.config, 0
    if jax.default_backend() == "cpu" and not has_records and config.moe_layers:
        blocks = len(config.moe_layers) * config.moe.num_experts
        copied = blocks * reader.layout.num_bytes(widened(reader.dtype))
    if jax.default_backend() != "cpu":
        return f"{auto_bytes(free)}B"
    if copied > free:
        raise CapacityError(
            f"device_memory is 'auto', and of memory {free} bytes are free, copies of "
            f"the experts take {copied}; keep them in the files of a checkpoint of "
            "ours (--weights mapped without --device_memory, or offload.memory = "
            "'mmap')"
        )
    return f"{auto_bytes(free, copied, len(devices))}B"


def auto_bytes(free_bytes: int, copied_bytes: int = 0, devices: int = 1) -> int:
    """A device's budget: nine tenths of what is free and no copies of experts take.

    Args:
      devices: that are one memory, as those of a CPU.
    """
    return max(1, int((free_bytes - copied_bytes) // devices * (1 - SPARE_SHARE)))
