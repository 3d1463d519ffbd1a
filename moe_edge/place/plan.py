"""A placement: which GPU of which server holds which expert block, and its laws.

A block is the unit (an expert, or a sub-expert of a refactored model); all blocks of a
model have one size, so memory is counted in slots of one block. A server holds a block
at most once: a second copy on another GPU of it would save no remote call.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError, check_shape
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json
from moe_edge.core.npy import load_npy
from moe_edge.core.typed import built

FORMAT_VERSION = 1
ABSENT = -1
MAX_GPUS = 127  # of a server: GPU numbers are int8
MAX_SLOTS = 2**48  # of a GPU, so that sums stay within 64 bits


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where blocks are.

    Attributes:
      gpu_NLE: int8 [N, L, E], the GPU of server N that holds the block, or -1.
    """

    gpu_NLE: np.ndarray

    def __post_init__(self):
        gpu_NLE = np.asarray(self.gpu_NLE)
        check_shape("placement gpu_NLE", gpu_NLE, (None, None, None))
        object.__setattr__(self, "gpu_NLE", gpu_NLE.astype(np.int8))

    @property
    def on_NLE(self) -> np.ndarray:
        """bool [N, L, E]: the server holds the block."""
        return self.gpu_NLE >= 0

    @property
    def copies_LE(self) -> np.ndarray:
        """int64 [L, E]: how many servers hold the block."""
        return self.on_NLE.sum(axis=0)

    @property
    def coverage(self) -> float:
        """Share of blocks that some server holds."""
        return float((self.copies_LE > 0).mean())

    def memory_use(self, slots: Sequence[np.ndarray]) -> float:
        """Share of all slots that hold a block."""
        return float(self.on_NLE.sum() / sum(slots_G.sum() for slots_G in slots))

    def check(self, slots: Sequence[np.ndarray]) -> None:
        """Raises CapacityError unless every block is somewhere and every GPU holds it.

        Args:
          slots: of every server, blocks that fit on each of its GPUs.
        """
        if len(slots) != len(self.gpu_NLE):
            raise ConfigError(
                f"placement is over {len(self.gpu_NLE)} servers, slots are of "
                f"{len(slots)}"
            )
        absent = np.argwhere(self.copies_LE == 0)
        if len(absent):
            layer, block = absent[0].tolist()
            raise CapacityError(
                f"{len(absent)} blocks are on no server, the first is block {block} of "
                f"layer {layer}; a placement covers every block"
            )
        for server, (gpu_LE, slots_G) in enumerate(
            zip(self.gpu_NLE, slots, strict=True)
        ):
            used_G = np.bincount(gpu_LE[gpu_LE >= 0], minlength=len(slots_G))
            if len(used_G) > len(slots_G):
                raise ConfigError(
                    f"server {server} has {len(slots_G)} GPUs, the placement uses GPU "
                    f"{len(used_G) - 1}"
                )
            for gpu in np.flatnonzero(used_G > slots_G):
                raise CapacityError(
                    f"GPU {gpu} of server {server} is given {used_G[gpu]} blocks, it "
                    f"holds {slots_G[gpu]}"
                )

    def save(self, stem: str | Path, facts: dict | None = None) -> None:
        """Writes `STEM.npy` (bool [N, L, E]) and `STEM.json` (GPUs, `facts`)."""
        np.save(f"{stem}.npy", self.on_NLE)
        stored = {
            "format_version": FORMAT_VERSION,
            "shape": list(self.gpu_NLE.shape),
            "gpus": [gpu_LE[gpu_LE >= 0].tolist() for gpu_LE in self.gpu_NLE],
        }
        text = json.dumps((facts or {}) | stored, allow_nan=False)
        write_text(f"{stem}.json", text + "\n")

    @classmethod
    def load(cls, stem: str | Path) -> "Placement":
        """Reads what `save` wrote.

        Raises:
          ConfigError: files that do not belong together, or of another version.
          OSError: a file is missing.
        """
        on_NLE, path = load_npy(Path(f"{stem}.npy")), Path(f"{stem}.json")
        stored = read_json(path, max_bytes=LARGE_FILE_BYTES)
        version = stored.get("format_version") if isinstance(stored, dict) else None
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format_version {version}, expected {FORMAT_VERSION}"
            )
        file = built(str(path), _File, stored, ignore_more=True)
        shape = list(on_NLE.shape)
        if on_NLE.dtype != bool or file.shape != shape or len(shape) != 3:
            raise ConfigError(f"{path} is of a placement {file.shape}, got {shape}")
        counts = [len(gpus) for gpus in file.gpus]
        if counts != on_NLE.sum(axis=(1, 2)).tolist():
            raise ConfigError(f"{path} and its .npy disagree about how many blocks")
        gpu_NLE = np.full(shape, ABSENT, np.int8)
        gpu_NLE[on_NLE] = np.concatenate([np.array(g, int) for g in file.gpus])
        return cls(gpu_NLE)


@dataclasses.dataclass(frozen=True)
class _File:
    """What the JSON file of a placement holds beside facts for people."""

    shape: list[int]
    gpus: list[list[int]]

    def __post_init__(self):
        for server, gpus in enumerate(self.gpus):
            for gpu in gpus:
                if not 0 <= gpu < MAX_GPUS:
                    raise ConfigError(
                        f"placement: server {server} holds a block on GPU {gpu}, "
                        f"expected 0 to {MAX_GPUS - 1}"
                    )


def check_slots(
    slots: Sequence[np.ndarray],
    num_servers: int,
    num_blocks: int,
    block_bytes: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Slots of a problem that has a solution, as int64 arrays.

    A server may have room for no block: its requests call those of others.

    Args:
      slots: of every server, blocks that fit on each of its GPUs.
      num_servers, num_blocks: servers, and blocks of one copy of the model.
      block_bytes: size of a block, for the message.
    Raises:
      ConfigError: slots of another number of servers, GPUs or blocks.
      CapacityError: in all less than one copy of the model.
    """
    if len(slots) != num_servers:
        raise ConfigError(
            f"slots are given for {len(slots)} servers, there are {num_servers}; give "
            "one entry a server"
        )
    checked = []
    for server, slots_G in enumerate(slots):
        slots_G = np.atleast_1d(np.asarray(slots_G))
        if slots_G.ndim != 1 or not 0 < len(slots_G) <= MAX_GPUS:
            raise ConfigError(
                f"server {server} has slots for {slots_G.size} GPUs, expected 1 to "
                f"{MAX_GPUS}"
            )
        whole = slots_G.dtype.kind in "iu"
        if not whole or (slots_G < 0).any() or (slots_G > MAX_SLOTS).any():
            raise ConfigError(
                f"slots of server {server} are {slots_G.tolist()}, expected whole "
                f"numbers from 0 to {MAX_SLOTS}"
            )
        checked.append(slots_G.astype(np.int64))
    total = int(sum(slots_G.sum() for slots_G in checked))
    if total < num_blocks:
        missing = num_blocks - total
        size = "" if block_bytes is None else f" ({missing * block_bytes} bytes)"
        raise CapacityError(
            f"the servers hold {total} blocks, one copy of the model needs "
            f"{num_blocks}: {missing} blocks{size} are missing; add memory or servers"
        )
    return tuple(checked)
