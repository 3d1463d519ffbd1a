"""Room on disk: asked for before a run, because a full disk kills memory-mapped files.

Writing to a hole of a sparse file on a full disk is a SIGBUS, which no code catches.
So the need is compared with what is free, and scratch files are allocated in full.
"""

import os
import shutil
from pathlib import Path

import numpy as np

from moe_edge.core.checks import CapacityError

GIB = 1 << 30
HEADER = 128  # bytes of an .npy file before its data
SCRATCH_ARRAYS = 3  # states before and after a layer, and the experts' input
# A row of one expert: F float16 activations, a float32 weight and an int8 rank.
ARRAYS, VALUE_BYTES, BESIDE_BYTES = 3, 2, 5


def needed_bytes(
    config,
    windows: int,
    window: int,
    max_rows: int,
    hidden: bool = False,
    probes: int = 0,
    probe_neurons: int = 0,
) -> tuple[int, int]:
    """(scratch, profile): bytes that a run over N windows of W tokens writes at most.

    Args:
      max_rows: kept of each expert; hidden: their inputs, too.
      probes: layers that they look ahead; probe_neurons: of each.
    """
    moe, tokens = config.moe, windows * window
    float_bytes = np.dtype(np.float32).itemsize
    scratch = (SCRATCH_ARRAYS + probes) * tokens * config.d_model * float_bytes
    rows = min(moe.num_experts * max_rows, tokens * moe.top_k)
    values = moe.expert_dim + config.d_model * hidden
    experts = rows * (values * VALUE_BYTES + BESIDE_BYTES)
    together = moe.num_experts**2 * np.dtype(np.int64).itemsize
    files = (ARRAYS + hidden) * moe.num_experts + 1
    row = config.d_model + 1
    probe_values = moe.num_experts * row + probe_neurons * (2 * row + moe.num_experts)
    probe = probe_values * float_bytes + 2 * HEADER
    layer = experts + together + files * HEADER + probes * probe
    return scratch, len(config.moe_layers) * layer


def check_space(folder: Path, scratch: int, profile: int) -> None:
    """Refuses a run that would fill the disk.

    Args:
      folder: the work folder; what an earlier run left in it counts as there.
      scratch, profile: from `needed_bytes`.
    Raises:
      CapacityError: less is free.
    """
    parent = folder
    while not parent.exists():
        parent = parent.parent
    # Blocks, not lengths: holes of a sparse file are still to be paid.
    paths = [path for path in folder.rglob("*") if path.is_file()]
    used = sum(path.stat().st_blocks * 512 for path in paths)
    missing, free = scratch + profile - used, shutil.disk_usage(parent).free
    if missing > free:
        raise CapacityError(
            f"the profile needs {missing / GIB:.3g} GiB more below {parent} "
            f"(activations {profile / GIB:.3g}, hidden states while it runs "
            f"{scratch / GIB:.3g}), but {free / GIB:.3g} GiB are free; make room, or "
            "give fewer --tokens or --max_tokens_per_expert, or another --out_dir"
        )


def allocate(path: Path) -> None:
    """Gives every byte of a file its place on disk.

    Raises:
      CapacityError: the disk is full.
    """
    size = path.stat().st_size
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise CapacityError(
                f"scratch file {path} of {size / GIB:.3g} GiB finds no room: "
                f"{error.strerror}; make room or give fewer --tokens"
            ) from error
