"""What machines are: devices, links, GPUs, servers, clusters. Numbers, no formulas.

Units are SI: bytes, seconds, operations. Every device and link says where its numbers
come from (`source`), so that a result can say whether they were measured here, read
in a paper or a data sheet, or assumed.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from moe_edge.core.checks import (
    CapacityError,
    ConfigError,
    check_from_zero,
    check_known,
    check_positive,
)

# "pair": every ordered pair of servers has a link of its own. "egress": all that a
# server sends goes over one link (Prism's testbed: `tc` shapes what leaves a host).
SHARING = ("pair", "egress")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A processor and its memory.

    Attributes:
      name: of the product.
      memory_bytes: capacity.
      flops_per_s: achievable dense rate at the precision of the weights; a multiply
        and an add are two.
      memory_bytes_per_s: achievable rate of reading weights.
      source: where the numbers come from.
      call_s: fixed time of one call (kernel launches), whatever its size.
      checked: False if a number could not be held against its source.
      curve: (operations a byte, factor) of a measured device, rising: how much longer
        than by these rates a call takes; linear in the logarithm between two points,
        constant outside. Empty: the rates alone.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    source: str
    call_s: float = 0.0
    checked: bool = True
    curve: tuple[tuple[float, float], ...] = ()

    def __post_init__(self):
        for field in ("memory_bytes", "flops_per_s", "memory_bytes_per_s"):
            check_positive(f"{self.name}: {field}", getattr(self, field))
        check_from_zero(f"{self.name}: call_s", self.call_s)
        object.__setattr__(self, "curve", tuple(map(tuple, self.curve)))
        before = 0.0
        for intensity, factor in self.curve:
            check_positive(f"{self.name}: curve's operations a byte", intensity)
            check_positive(f"{self.name}: curve's factor", factor)
            if intensity <= before:
                raise ConfigError(
                    f"{self.name}: curve has {intensity} after {before} operations a "
                    "byte, expected rising ones"
                )
            before = intensity

    def slowdown(self, intensity):
        """The curve's factor at so many operations a byte (number or array)."""
        if not self.curve:
            return 1.0
        known, factors = zip(*self.curve, strict=True)
        at_least = np.maximum(intensity, known[0])
        return np.interp(np.log2(at_least), np.log2(known), factors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link that carries one message after another.

    Attributes:
      bytes_per_s: rate; infinite for a link that costs nothing.
      latency_s: from the last byte sent to its arrival; the link is free meanwhile.
      source, checked: as in Device.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    source: str
    checked: bool = True

    def __post_init__(self):
        if not self.bytes_per_s > 0:  # infinity too is a rate
            raise ConfigError(
                f"link rate bytes_per_s must be positive, got {self.bytes_per_s}"
            )
        check_from_zero("link latency_s", self.latency_s)

    def busy_s(self, num_bytes):
        """How long the link is occupied by so many bytes (number or array)."""
        return num_bytes / self.bytes_per_s

    def seconds(self, num_bytes):
        """From the first byte sent to the last byte there."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device in a server.

    Attributes:
      device: what it is.
      host_link: from host memory to it.
      expert_memory_bytes: what expert blocks may use; None: all of its memory.
    """

    device: Device
    host_link: Link
    expert_memory_bytes: int | None = None

    def __post_init__(self):
        limit, memory = self.expert_memory_bytes, self.device.memory_bytes
        if limit is not None and not 0 <= limit <= memory:
            raise ConfigError(
                f"{self.device.name}: expert_memory_bytes is {limit}, expected 0 to "
                f"{memory}, the memory of the device"
            )

    def slots(self, block_bytes: int) -> int:
        """How many expert blocks fit."""
        limit = self.expert_memory_bytes
        return int(
            (self.device.memory_bytes if limit is None else limit) // block_bytes
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A host: GPUs behind host links."""

    name: str
    gpus: tuple[Gpu, ...]

    def __post_init__(self):
        if not self.gpus:
            raise ConfigError(f"server {self.name} has no GPU; expected at least one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Servers and the network between them.

    Attributes:
      servers: numbered from 0, as everywhere in placements and statistics.
      network: the link between any two servers.
      links: (sender, receiver) -> link, where it differs from `network`.
      sharing: one of SHARING.
    """

    servers: tuple[Server, ...]
    network: Link
    links: Mapping[tuple[int, int], Link] = dataclasses.field(default_factory=dict)
    sharing: str = "pair"

    def __post_init__(self):
        if not self.servers:
            raise ConfigError("a cluster needs at least one server, got none")
        check_known("network sharing", self.sharing, SHARING)
        for n, m in self.links:
            known = range(self.num_servers)
            if n not in known or m not in known or n == m:
                raise ConfigError(
                    f"link ({n}, {m}) joins no two of the {self.num_servers} servers"
                )

    @property
    def num_servers(self) -> int:
        return len(self.servers)

    def link(self, n: int, m: int) -> Link:
        """The link that carries from server n to another server m."""
        return self.links.get((n, m), self.network)

    def slots(self, block_bytes: int) -> list[np.ndarray]:
        """Blocks that fit: for each server an int64 array with one number a GPU."""
        check_positive("block_bytes", block_bytes)
        return [
            np.array([gpu.slots(block_bytes) for gpu in server.gpus], np.int64)
            for server in self.servers
        ]

    def check_holds(self, num_blocks: int, block_bytes: int) -> None:
        """Raises CapacityError unless one copy of every block fits somewhere."""
        held = int(sum(slots_G.sum() for slots_G in self.slots(block_bytes)))
        if held < num_blocks:
            missing = (num_blocks - held) * block_bytes
            raise CapacityError(
                f"the cluster holds {held} expert blocks, one copy of the model needs "
                f"{num_blocks}: {missing} bytes ({missing / 1e9:.2f} GB) are missing; "
                "raise expert_memory_bytes or add GPUs"
            )
