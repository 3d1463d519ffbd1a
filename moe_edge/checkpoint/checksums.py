"""Checksums of a checkpoint of ours: files that were damaged, exchanged or replaced.

The manifest holds a CRC-32 of every record, by layer, and of every dense item:

  "checksums": {"experts": {"0": "8c736521 1b0ecf0b"}, "dense": {"top": "4a17b156"}}

After the last record of a layer's file follows a trailer: the layer, and a tag made
from the CRCs of its records. So a file that is another layer's or another checkpoint's
is recognised without reading its records. Format version 1 had neither.
"""

import dataclasses
import hashlib
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.schema import Item, dense_items, name_some
from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import as_stored

KEY = "checksums"
_TRAILER = struct.Struct("<8sI16s36x")  # 64 bytes, as records are multiples of 64
_MAGIC = b"moeedge2"
AGAIN = "copy the checkpoint again, or convert (or refactor) the model again"


def crc32(array: np.ndarray) -> int:
    """Of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def item_crc32(arrays: Mapping) -> int:
    """Of a dense item: of its tensors' names, dtypes, shapes and bytes."""
    found = 0
    for name, weight in sorted(arrays.items()):
        array = as_stored(weight)
        head = f"{name} {array.dtype.name} {array.shape} {crc32(array):08x}\n"
        found = zlib.crc32(head.encode(), found)
    return found


def make_trailer(layer: int, crcs: Sequence[int]) -> bytes:
    """What follows the last record of a layer's file."""
    tag = hashlib.sha256(struct.pack(f"<{len(crcs) + 1}I", layer, *crcs)).digest()
    return _TRAILER.pack(_MAGIC, layer, tag[:16])


def check_trailer(path: Path, found: bytes, expected: bytes) -> None:
    """Raises CheckpointError if a file has another trailer than `make_trailer` says."""
    if found == expected:
        return
    magic, layer, _ = _TRAILER.unpack(found)
    wanted = _TRAILER.unpack(expected)[1]
    if magic != _MAGIC:
        what = "is damaged: the layer and tag after its records cannot be read"
    elif layer != wanted:
        what = f"holds the experts of layer {layer}, expected {wanted}"
    else:
        what = (
            "is of another checkpoint than the manifest, or one of the two was "
            "changed: the file's tag is not that of the manifest's checksums"
        )
    raise CheckpointError(f"{path} {what}; {AGAIN}")


@dataclasses.dataclass
class Checksums:
    """CRC-32 of a checkpoint's weights as stored.

    Attributes:
      experts: of the records of every MoE layer, in order.
      dense: of every dense item.
    """

    experts: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    dense: dict[Item, int] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, dict[str, str]]:
        """The object of the manifest; a line a layer."""
        return {
            "experts": {
                str(layer): " ".join(f"{crc:08x}" for crc in crcs)
                for layer, crcs in sorted(self.experts.items())
            },
            "dense": {str(item): f"{crc:08x}" for item, crc in self.dense.items()},
        }

    @classmethod
    def of_manifest(
        cls, path: Path, value: dict[str, Any], config: ModelConfig
    ) -> "Checksums":
        """Reads the object of a manifest.

        Args:
          path: of the manifest, for messages.
          config: the model; of a refactored one, its experts are sub-experts.
        Raises:
          CheckpointError: not as `as_json` writes it, or of other layers or experts.
        """
        try:
            experts = {
                int(layer): [_parse(crc) for crc in crcs.split()]
                for layer, crcs in value["experts"].items()
            }
            items = {str(item): item for item in dense_items(config)}
            dense = {
                items.get(item, item): _parse(crc)
                for item, crc in value["dense"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: checksums of the manifest cannot be read "
                f"({type(error).__name__}: {error}); {AGAIN}"
            ) from error
        _check_keys(f"{path}: checksums of experts", experts, config.moe_layers)
        _check_keys(f"{path}: checksums of dense", dense, items.values())
        for layer, crcs in experts.items():
            if len(crcs) != config.moe.num_experts:
                raise CheckpointError(
                    f"{path}: checksums of layer {layer} are {len(crcs)}, expected "
                    f"{config.moe.num_experts}; {AGAIN}"
                )
        return cls(experts, dense)

    def check_dense(self, where: Path, item: Item, arrays: Mapping) -> None:
        """Raises CheckpointError if a dense item is not the one that was written.

        Args:
          where: the item's folder, for the message.
          arrays: as stored, before any cast.
        """
        check_crc(str(where), item_crc32(arrays), self.dense[item])


def check_records(
    path: Path, first: int, records_NR: np.ndarray, crcs: Sequence[int]
) -> None:
    """Raises CheckpointError if records, the first of which is `first`, are damaged.

    Args:
      crcs: of all records of the layer.
    """
    for row, record_R in enumerate(records_NR, first):
        check_crc(f"{path}: record {row}", crc32(record_R), crcs[row])


def check_crc(where: str, found: int, expected: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"{where} has CRC-32 {found:08x}, expected {expected:08x}: it was damaged "
            f"or exchanged; {AGAIN}"
        )


def _parse(text: str) -> int:
    if not re.fullmatch("[0-9a-f]{8}", text):
        raise ValueError(f"{text[:20]!r} is no CRC-32 of eight hexadecimal digits")
    return int(text, 16)


def _check_keys(where: str, found: Mapping, expected) -> None:
    if set(found) != set(expected):
        raise CheckpointError(
            f"{where} are of {name_some(map(str, found))}, expected "
            f"{name_some(map(str, expected))}; {AGAIN}"
        )
