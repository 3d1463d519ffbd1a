"""What experts cost on each kind of device: `coe_profile.json`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_edge.core.checks import (
    CheckpointError,
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.core.json_reader import read_json
from moe_edge.core.typed import built

TIERS = ("disk", "host")


def bucket(n: int) -> int:
    """The power of two from n on: batches are padded to it."""
    return 1 << (n - 1).bit_length()


def largest_bucket(n: int) -> int:
    """The power of two up to n: the most images that are padded to no more."""
    return 1 << (n.bit_length() - 1)


def buckets(most: int) -> list[int]:
    """The powers of two that batches up to `most` are padded to."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]


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

    @property
    def batch_bytes(self) -> int:
        """Memory of the largest batch, padded as it is computed."""
        return bucket(self.max_batch) * self.item_bytes


Devices = Mapping[str, Mapping[str, ArchitectureCosts]]  # kind -> architecture -> costs


def read_profile(path: str | Path) -> Devices:
    """The devices of a `coe_profile.json`.

    Raises:
      CheckpointError: no such file, or no JSON; ConfigError: anything in it is wrong.
    """
    given = read_json(path, CheckpointError)
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


FIELDS = {
    "k_s": float,
    "b_s": float,
    "max_batch": int,
    "item_bytes": int,
    "disk_s": float,
    "host_s": float,
}


def override(devices: Devices, changes: Sequence[str]) -> Devices:
    """Costs with some numbers replaced by what the user says.

    Args:
      changes: KIND.ARCHITECTURE.FIELD=NUMBER; `*` for every kind or architecture;
        FIELD one of k_s, b_s, max_batch, item_bytes, disk_s, host_s.
    Raises:
      ConfigError: another form, or names nobody knows.
    """
    found = {kind: dict(each) for kind, each in devices.items()}
    for text in changes:
        kinds, names, field, value = _parsed(text, devices)
        for kind in kinds:
            for name in names:
                found[kind][name] = _changed(found[kind][name], field, value)
    return found


def _parsed(
    text: str, devices: Devices
) -> tuple[Sequence[str], Sequence[str], str, float]:
    where, _, number = text.partition("=")
    parts = where.split(".")
    if len(parts) != 3:
        raise ConfigError(
            f"set is {text!r}, expected such as cpu.classifier.k_s=0.001 or "
            "*.*.disk_s=0.1"
        )
    kind, name, field = parts
    known = {name for each in devices.values() for name in each}
    for what, one, there in (("kind", kind, devices), ("architecture", name, known)):
        if one != "*":
            check_known(f"{what} in set {text!r}", one, there)
    check_known(f"field in set {text!r}", field, FIELDS)
    try:
        value = FIELDS[field](number)
    except ValueError as error:
        raise ConfigError(
            f"set is {text!r}: {number!r} is no number that {field} may be"
        ) from error
    kinds = list(devices) if kind == "*" else [kind]
    return kinds, sorted(known) if name == "*" else [name], field, value


def _changed(costs: ArchitectureCosts, field: str, value: float) -> ArchitectureCosts:
    tier = {"disk_s": "disk", "host_s": "host"}.get(field)
    if tier is not None:
        changed = {"load_s": {**costs.load_s, tier: value}}
    else:
        changed = {field: value}
    return dataclasses.replace(costs, **changed)


def _costs(where: str, given: object) -> ArchitectureCosts:
    try:
        return built(where, ArchitectureCosts, given)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if where in text else f"{where}: {text}") from error
