"""On which devices a model runs: what `--devices` says, or what its weights need.

Where all experts fit they are shared out (`sharded`), offloaded ones have homes
(`homes`).
"""

import dataclasses
from typing import TYPE_CHECKING

from moe_edge.core import processes
from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.progress import say
from moe_edge.engine.offload_options import OffloadOptions

if TYPE_CHECKING:
    import jax

    from moe_edge.engine.mesh import DeviceMesh

ALL = "all"
SPARE_SHARE = 0.1  # of a device's free memory, for caches and what programs need


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """On which devices a model runs.

    Attributes:
      devices: devices that share the experts: a number, or `all` of this machine;
        offloaded ones have homes there, and `device_memory` is that of each. None: one,
        or all where one cannot hold the weights. Of several processes: of each; None:
        all.
      split_attention: each of several devices computes its heads of attention and keeps
        their part of the KV cache; a GPU's logits may then differ in their last bits.
      devices_trace: route trace by whose counts experts are placed on several devices;
        None: neighbours stand together.
      devices_replicas: slots more of each device and layer, for copies of the experts
        that the trace uses most: every step computes one of them where there is least
        to do.
    """

    devices: int | str | None = None
    split_attention: bool = False
    devices_trace: str | None = None
    devices_replicas: int = 0

    def __post_init__(self):
        """Raises ConfigError for no number of devices or slots, or copies of experts
        without counts that say of which."""
        object.__setattr__(self, "devices", check_devices(self.devices))
        replicas = self.devices_replicas
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            raise ConfigError(
                f"devices_replicas is {replicas!r}, expected a number from 0: slots "
                "of each device and layer for copies of experts"
            )
        if replicas and self.devices_trace is None:
            raise ConfigError(
                f"devices_replicas is {replicas}, and no counts say which experts "
                "to copy; give devices_trace, or leave it out"
            )

    def mesh(self, reader, offload: OffloadOptions | None) -> "DeviceMesh | None":
        """The devices of a resident model, see `mesh_for`.

        Raises:
          ConfigError: one device for what is of several.
        """
        mesh = mesh_for(reader, self.devices, offload)
        given = ("split_attention", "devices_trace")
        wanted = " and ".join(name for name in given if getattr(self, name))
        if wanted and offload is not None:
            raise ConfigError(
                f"{wanted}: of several devices of a resident engine, and experts are "
                "offloaded; leave it out, or device_memory"
            )
        if wanted and mesh is None:
            raise ConfigError(
                f"{wanted}: of several devices of a resident engine, and there is one; "
                "give devices, or leave it out"
            )
        return mesh

    def check(self, reader, offload: OffloadOptions | None) -> None:
        """What loading for these devices would refuse; nothing without a word of them.

        Raises: as `mesh` and `split_attention.make_sharded`.
        """
        if self == DeviceOptions():
            return
        mesh = self.mesh(reader, offload)
        if self.split_attention:
            from moe_edge.engine.split_attention import check_split

            check_split(reader.config, mesh.size, reader.dense_kinds)
        if self.devices_trace is not None:
            from moe_edge.engine.run_context import count_trace

            count_trace(self.devices_trace, reader.config)
            check_replicas(reader, mesh, self.devices_replicas)


Devices = DeviceOptions | int | str | None


def device_options(devices: Devices) -> DeviceOptions:
    """These options, or those that say how many devices, and no more."""
    if isinstance(devices, DeviceOptions):
        return devices
    return DeviceOptions(devices=devices)


def check_devices(devices: int | str | None) -> int | str | None:
    """A number of devices, "all", or None: as many as are needed; without JAX.

    Raises:
      ConfigError: anything else.
    """
    if devices is None or devices == ALL:
        return devices
    number = devices
    if isinstance(devices, str) and devices.isascii() and devices.isdecimal():
        number = int(devices)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(
            f"devices is {devices!r}, expected a number from 1, or {ALL!r} of this "
            "machine"
        )
    check_count("devices", number)
    return number


def mesh_for(
    reader, devices: int | str | None, offload: OffloadOptions | None
) -> "DeviceMesh | None":
    """The devices that a resident model is to run on; None: the first one alone.

    Args:
      reader: an open checkpoint.
      devices: see `check_devices`. None: all of this machine where one cannot hold the
        weights, else one. Of several processes (`hosts/`): of each; None: all.
      offload: not None: None (see `homes_for`).
    Raises:
      ConfigError: more devices than there are, or a dense model.
    """
    devices, count = check_devices(devices), processes.count()
    if count > 1 and not reader.config.moe_layers:
        raise ConfigError(
            f"{count} processes, and a dense model has no experts that they could "
            "share; run it in one"
        )
    if offload is not None:
        _check_one_process()
        return None
    if count > 1 and devices is None:
        devices = ALL
    if devices == 1 and count == 1:
        return None
    if devices is None and not (reader.config.moe_layers and _needs_all(reader)):
        return None
    mesh = _mesh(reader, ALL if devices is None else devices)
    return mesh if mesh.size > 1 else None


def homes_for(reader, devices: int | str | None) -> tuple["jax.Device", ...]:
    """The devices where offloaded experts have homes; none: the first one runs alone.

    Args and Raises: as of `mesh_for`; None: one device.
    """
    _check_one_process()
    devices = check_devices(devices)
    if devices in (None, 1):
        return ()
    mesh = _mesh(reader, devices)
    return tuple(mesh.mesh.devices.tolist()) if mesh.size > 1 else ()


def _check_one_process() -> None:
    if (count := processes.count()) > 1:
        raise ConfigError(
            f"{count} processes, and experts that are offloaded run in one; leave out "
            "device_memory, or --coordinator"
        )


def _mesh(reader, devices: int | str) -> "DeviceMesh":
    """So many devices of this machine; says which of them hold nothing."""
    if not reader.config.moe_layers:
        raise ConfigError(
            f"devices is {devices}, and a dense model has no experts that they could "
            "share; leave it out"
        )
    from moe_edge.engine.mesh import local_mesh

    mesh = local_mesh(None if devices == ALL else devices)
    experts = reader.config.moe.num_experts
    if mesh.size > experts:
        say(
            f"{mesh.size} devices share {experts} experts a layer: "
            f"{mesh.size - experts} of them hold none"
        )
    return mesh


def check_replicas(reader, mesh: "DeviceMesh", replicas: int) -> None:
    """Raises ConfigError for more slots of copies than there is room for."""
    if not replicas:
        return
    experts = reader.config.moe.num_experts
    share = -(-experts // mesh.size)
    if replicas > experts - share:
        raise ConfigError(
            f"devices_replicas is {replicas}, and a device that holds {share} of "
            f"{experts} experts a layer has room for {experts - share} more; give at "
            "most that"
        )
    import jax

    from moe_edge.engine.device_memory import free_device_bytes

    needed, free = _needed_bytes(reader, share + replicas), free_device_bytes()
    if jax.default_backend() == "cpu":  # whose devices are one memory
        needed *= mesh.size
    if free is not None and needed > free:
        raise ConfigError(
            f"devices_replicas is {replicas}: weights would take {needed} bytes, and "
            f"{free} are free; give fewer"
        )


def _needed_bytes(reader, experts: int) -> int:
    """Of weights, with so many experts a layer."""
    from moe_edge.engine.weights import weight_shapes
    from moe_edge.offload.store import device_dtype

    record_bytes = reader.layout.num_bytes(device_dtype(reader.dtype))
    layers = len(reader.config.moe_layers)
    return weight_shapes(reader).num_bytes + layers * experts * record_bytes


def _needs_all(reader) -> bool:
    """Whether there are several devices and the first cannot hold all weights."""
    import jax

    from moe_edge.engine.device_memory import free_device_bytes

    # The devices of a CPU are one memory.
    if len(jax.local_devices()) == 1 or jax.default_backend() == "cpu":
        return False
    free = free_device_bytes()
    needed = _needed_bytes(reader, reader.config.moe.num_experts)
    return free is not None and needed > (1 - SPARE_SHARE) * free
