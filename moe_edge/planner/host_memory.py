"""Where a plan's experts lie on the host: copies of them, or the pages of their files.

Copies are memory of the process's own (anonymous). Pages of mapped files are not: the
system drops them where it needs memory, and reads them again.
"""

import dataclasses

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.auto_memory import AUTO, auto_bytes
from moe_edge.engine.devices import SPARE_SHARE
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.budget import parse_budget
from moe_edge.offload.store import check_mappable, widened
from moe_edge.planner.options import PlanOptions

MMAP = "mmap"
PAGES_NOTE = (
    "pages of mapped files are taken to be in memory: one that the system has dropped "
    "is read from its disk, which no time here counts"
)


def expert_bytes(live) -> int:
    """Of all experts, in records as programs take them.

    Args:
      live: has `config` and `block_bytes`.
    """
    return len(live.config.moe_layers) * live.config.moe.num_experts * live.block_bytes


def on_host(options: OffloadOptions, live) -> tuple[int, int]:
    """Bytes of the experts that are copied, and that are mapped, besides slots."""
    every = expert_bytes(live)
    return (0, every) if options.memory == MMAP else (every, 0)


def is_mappable(live, reader) -> bool:
    """Whether the experts of an open checkpoint can be mapped; where a config alone is
    known (`reader` is None), once it is converted."""
    if reader is None:
        return widened(live.dtype) == live.dtype
    try:
        check_mappable(reader)
    except ConfigError:
        return False
    return True


def with_memory(
    asked: PlanOptions,
    base: OffloadOptions,
    fixed: frozenset[str],
    live,
    reader,
    free_bytes: int | None,
) -> OffloadOptions:
    """The base; with the experts in their files where copies do not fit and files will.

    Args:
      live: `Described`: the model on a machine.
      reader: of the checkpoint; None: a config alone is known.
      free_bytes: of a CPU's memory; None: of a GPU, whose host nobody describes.
    Raises:
      CapacityError: a free budget, no room for copies, and nothing that can be mapped.
      ConfigError: files are fixed, and the checkpoint's cannot be mapped.
    """
    if base.memory == MMAP and reader is not None:
        check_mappable(reader)
    if free_bytes is None or base.memory == MMAP:
        return base
    copied, limit = expert_bytes(live), asked.host_memory
    most = free_bytes if limit is None else parse_budget(limit).bytes or 0
    needs = live.needs(base)
    least = needs.other_bytes + needs.least_slots * live.block_bytes
    room = free_bytes - copied
    if budgets := asked.budgets(base, fixed):
        budget = parse_budget(budgets[-1])
        share = needs.other_bytes + int((budget.share or 0) * copied)
        least = max(least, share if budget.bytes is None else budget.bytes)
    else:
        room = auto_bytes(free_bytes, copied)
    if copied <= most and least <= room:
        return base
    is_fixed = "memory" in fixed
    if not is_fixed and is_mappable(live, reader):
        return dataclasses.replace(base, memory=MMAP)
    is_open = "device_memory" not in fixed and asked.device_memory in (None, AUTO)
    if is_open and least > room:
        raise CapacityError(
            f"copies of the experts take {copied} bytes and the least engine {least}, "
            f"of memory {free_bytes} are free; "
            + (f"leave memory {base.memory!r} open, or " if is_fixed else "")
            + "convert the checkpoint (moe-edge convert), whose experts can then stay "
            "in their files, or to --dtype q4_0"
        )
    return base


def check_beside_copies(
    options: OffloadOptions, live, slots: int, free_bytes: int
) -> None:
    """Raises CapacityError where so many slots do not fit beside copies."""
    held = live.needs(options).other_bytes + slots * live.block_bytes
    copied, _ = on_host(options, live)
    if held + copied > free_bytes:
        raise CapacityError(
            f"device memory of {options.device_memory} takes {held} bytes and copies "
            f"of the experts {copied}, of memory {free_bytes} are free; ask for less"
        )


def wants_mapped(
    asked: PlanOptions,
    base: OffloadOptions,
    fixed: frozenset[str],
    live,
    reader,
    free_bytes: int | None,
) -> bool:
    """Whether `--weights mapped`, all experts in their files and none in slots, is a
    candidate: on a CPU that cannot hold all in slots and can hold all pages, with a
    free budget and nothing of an offloaded engine fixed.

    Args: as of `with_memory`, of which `base` is.
    """
    if free_bytes is None or fixed or asked.device_memory not in (None, AUTO):
        return False
    if asked.link_bytes_per_s is not None or not is_mappable(live, reader):
        return False
    every, other = expert_bytes(live), live.needs(OffloadOptions()).other_bytes
    room = int(free_bytes * (1 - SPARE_SHARE))
    is_split = base.memory == MMAP or other + every > auto_bytes(free_bytes, every)
    return is_split and other + every <= room
