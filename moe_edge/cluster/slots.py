"""How many blocks each server of Prism's may hold, as `--slots` says."""

from moe_edge.cluster.prism_options import PrismOptions
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.place.cases import parse_slots

COPIES = 1.3  # of the model that all servers hold together, unless slots are given


def slots_of(options: PrismOptions, num_blocks: int) -> list[int]:
    """Blocks that each server may hold.

    Raises:
      ConfigError: slots of another number of servers, or of servers of many GPUs.
      CapacityError: less than one copy of the model besides the free slots.
    """
    servers, spare = options.servers, _spare(options)
    if options.slots is None:
        each = -(-int(COPIES * num_blocks) // servers)
        return [min(each, num_blocks) + spare] * servers
    groups = parse_slots(options.slots)
    if len(groups) != servers or any(len(group) != 1 for group in groups):
        raise ConfigError(
            f"--slots is {options.slots!r}, expected one number for each of the "
            f"{servers} servers, which have one GPU each"
        )
    slots = [int(group[0]) for group in groups]
    used = sum(max(n - spare, 0) for n in slots)
    if used < num_blocks:
        free = ("one slot of each server stays", "two slots of each server stay")
        raise CapacityError(
            f"--slots {options.slots} leave room for {used} blocks "
            f"({free[spare - 1]} free), one copy of the model needs {num_blocks} (of a "
            "refactored one each sub-expert is a block); add "
            f"{num_blocks - used} slots, or servers"
        )
    return slots


def room_of(options: PrismOptions, num_blocks: int) -> list[int]:
    """Blocks that a placement may put on each server; raises as `slots_of`."""
    return [max(n - _spare(options), 0) for n in slots_of(options, num_blocks)]


def _spare(options: PrismOptions) -> int:
    """Slots of each server that no placement uses."""
    return 1 + (options.period_s > 0)
