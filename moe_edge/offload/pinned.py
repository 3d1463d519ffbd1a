"""How much pinned host memory XLA may take on a GPU: set before JAX starts.

XLA reads `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` (64 GiB if it is not set) once, when JAX
starts. Models with more experts than that cannot be pinned under the default.
"""

import gc
import os

import jax
from jax._src.xla_bridge import backends_are_initialized

from moe_edge.core.checks import CapacityError
from moe_edge.offload.store import widened

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_GIB = 64
_SPARE_BYTES = 2 << 30  # for transfers and results that pass through pinned memory
_FIRST_REGION, _ALIGNMENT = 2 << 20, 256
_set_here: int | None = None  # the limit that this module has set


def needed_gib(count: int, num_bytes: int) -> int:
    """GiB of XLA's limit for `count` arrays of `num_bytes` each.

    XLA takes memory in regions, each twice the one before, the last one up to the
    limit. An array lies in one region, so that the end of a region stays unused.
    """
    each, region = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT, _FIRST_REGION
    total, left = 0, count
    while True:
        is_grown = region < each
        while region < each:
            region *= 2
        fitting = region // each
        if fitting >= left:
            break
        total, left = total + region, left - fitting
        region *= 1 if is_grown else 2
    return -(-(total + left * each + each + _SPARE_BYTES) // (1 << 30))


def pinned_gib(reader, options, mode: str) -> int:
    """GiB of the limit that an engine of these options and mode needs; 0: none.

    Args:
      reader: an open checkpoint.
      options: `OffloadOptions`.
      mode: `layered` or `fused`.
    """
    layers, experts = len(reader.config.moe_layers), reader.config.moe.num_experts
    if not layers:
        return 0
    block_bytes = reader.layout.num_bytes(widened(reader.dtype))
    if options.memory == "pinned":
        return needed_gib(layers * experts, block_bytes)
    if mode == "fused":  # an array a layer
        return needed_gib(layers, experts * block_bytes)
    return 0


def raise_limit(gib: int) -> None:
    """Sets the limit, if it must be more than it is, before JAX starts.

    Does nothing once JAX has started, or where somebody else has set the variable:
    `check_limit` judges then. On a CPU the variable means nothing.
    """
    global _set_here
    now = _set_here or DEFAULT_GIB
    is_ours = os.environ.get(VARIABLE) == (_set_here and str(_set_here))
    if gib > now and is_ours and not backends_are_initialized():
        _set_here = gib
        os.environ[VARIABLE] = str(gib)


def check_limit(gib: int, backend: str) -> None:
    """Checks that XLA may pin so much more in this process.

    Args:
      backend: JAX's.
    Raises:
      CapacityError: not under the limit that JAX started with on this GPU.
    """
    if backend != "gpu" or not gib:
        return
    given = os.environ.get(VARIABLE, "")
    limit = int(given) if given.lstrip("-").isdecimal() else DEFAULT_GIB
    before = gib_pinned_now()
    if limit < gib + before:
        gc.collect()  # engines that are closed and not yet gone
        before = gib_pinned_now()
    needed = gib + before
    if limit < needed:
        why = f"{VARIABLE}={given}" if given else f"its default of {DEFAULT_GIB} GiB"
        beside = f" next to {before} GiB that are pinned already" if before else ""
        raise CapacityError(
            f"the experts take {gib} GiB of pinned host memory{beside}, and JAX has "
            f"started with {why}; start again with: export {VARIABLE}={needed} (or "
            "keep experts in plain memory: offload.memory = 'host' and offload.mode = "
            "'layered')"
        )


def gib_pinned_now() -> int:
    """GiB of this process's arrays in pinned host memory, rounded up."""
    arrays = (a for a in jax.live_arrays() if a.sharding.memory_kind == "pinned_host")
    return -(-sum(array.nbytes for array in arrays) // (1 << 30))
