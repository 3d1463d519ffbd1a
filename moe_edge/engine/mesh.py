"""The devices that run a model as one program, and how values of the host get there.

Every device of a mesh runs the same programs on the same values; what differs are the
parts of arrays that are cut along their first axis, experts' records above all. All
values of the host go through `DeviceMesh.put` and `put_parts`.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moe_edge.core import processes
from moe_edge.core.checks import ConfigError

AXIS = "devices"
WHOLE, PARTED = PartitionSpec(), PartitionSpec(AXIS)


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """Devices in a row."""

    mesh: jax.sharding.Mesh

    @classmethod
    def of(cls, devices) -> "DeviceMesh":
        return cls(jax.sharding.Mesh(np.array(devices), (AXIS,)))

    @property
    def size(self) -> int:
        """N: how many devices there are."""
        return self.mesh.size

    @property
    def whole(self) -> NamedSharding:
        """Of arrays that every device holds whole."""
        return NamedSharding(self.mesh, WHOLE)

    @property
    def parted(self) -> NamedSharding:
        """Of arrays of whose first axis every device holds an equal part."""
        return NamedSharding(self.mesh, PARTED)

    @property
    def own(self) -> range:
        """Numbers of the devices of this process; those of each stand together."""
        index = jax.process_index()
        devices = enumerate(self.mesh.devices)
        numbers = [n for n, device in devices if device.process_index == index]
        return range(numbers[0], numbers[-1] + 1)

    def put(self, tree):
        """Arrays of the host, whole on every device."""
        return jax.device_put(tree, self.whole)

    def put_parts(
        self, shape: tuple[int, ...], part: Callable[[int], np.ndarray]
    ) -> jax.Array:
        """An array of whose first axis device n holds `part(n)`.

        Args:
          shape: of all of it.
          part: of the devices of this process only; the result may share its memory.
        """
        rows = shape[0] // self.size

        def read(index) -> np.ndarray:
            return part((index[0].start or 0) // rows)

        return jax.make_array_from_callback(shape, self.parted, read)

    def per_device(self, function: Callable, arguments, results=WHOLE) -> Callable:
        """A function that each device runs on what it holds, to be traced.

        Args:
          arguments: WHOLE or PARTED, of each argument; results: of what it returns.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(arguments),
            out_specs=results,
            check_vma=False,
        )


def local_mesh(count: int | None) -> DeviceMesh:
    """So many devices of this machine; None: all. Of several processes: of each.

    Raises:
      ConfigError: more than there are.
    """
    there = jax.local_devices()
    count = len(there) if count is None else count
    if count > len(there):
        raise ConfigError(
            f"{count} devices, and JAX sees {len(there)} ({there[0].platform}); ask "
            f"for at most {len(there)}"
        )
    several = range(processes.count())
    everywhere = map(jax.local_devices, several) if len(several) > 1 else [there]
    return DeviceMesh.of([device for own in everywhere for device in own[:count]])
