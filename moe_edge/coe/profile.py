"""What experts cost on each kind of device: `coe_profile.json`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from moe_edge.core.checks import (
    ConfigError,
    built,
    check_count,
    check_from_zero,
    check_positive,
)
from moe_edge.core.files import read_json

TIERS = ("disk", "host")


@dataclasses.dataclass(frozen=True)
class ArchitectureCosts:
    """An architecture on a kind of device.

    Attributes:
      k_s, b_s: a batch of n requests takes k_s n + b_s seconds.
      max_batch: beyond which an image takes no less time.
      item_bytes: memory that an image of a batch needs.
      record_bytes: of the weights of one expert.
      load_s: of a load from each of TIERS.
      r2: how well the line fits.
    """

    k_s: float
    b_s: float
    max_batch: int
    item_bytes: int
    record_bytes: int
    load_s: Mapping[str, float]
    r2: float = 1.0

    def __post_init__(self):
        check_positive("k_s", self.k_s)
        check_from_zero("b_s", self.b_s)
        check_count("max_batch", self.max_batch)
        check_from_zero("item_bytes", self.item_bytes)
        check_count("record_bytes", self.record_bytes)
        if set(self.load_s) != set(TIERS):
            raise ConfigError(
                f"load_s names {', '.join(self.load_s) or 'nothing'}, expected "
                f"{', '.join(TIERS)}"
            )
        for tier, seconds in self.load_s.items():
            check_from_zero(f"load_s of {tier}", seconds)


Devices = Mapping[str, Mapping[str, ArchitectureCosts]]  # kind -> architecture -> costs


def read_profile(path: str | Path) -> Devices:
    """The devices of a `coe_profile.json`.

    Raises:
      CheckpointError: no such file, or no JSON; ConfigError: anything in it is wrong.
    """
    given = read_json(Path(path))
    if not isinstance(given, Mapping) or not isinstance(given.get("devices"), Mapping):
        raise ConfigError(f"{path} holds no devices; expected a coe_profile.json")
    devices: dict[str, dict[str, ArchitectureCosts]] = {}
    for kind, architectures in given["devices"].items():
        if not isinstance(architectures, Mapping) or not architectures:
            raise ConfigError(f"{path}: device {kind!r} has no architectures")
        devices[kind] = {
            name: _costs(f"{path}: {name!r} on {kind!r}", one)
            for name, one in architectures.items()
        }
    if not devices:
        raise ConfigError(f"{path} holds no devices; expected at least one")
    return devices


def _costs(where: str, given: object) -> ArchitectureCosts:
    try:
        return built(where, ArchitectureCosts, given)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if where in text else f"{where}: {text}") from error
