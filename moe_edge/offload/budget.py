"""From one byte budget to slots: a share of the experts' bytes, or an amount."""

import dataclasses
import decimal
import math
import re

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError

MIN_SLOTS = 2  # one block computes while the next arrives
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Device memory: either a share of the expert bytes or an absolute amount."""

    share: float | None = None  # of all routed-expert bytes as stored, in (0, 1]
    bytes: int | None = None  # slots + staging + dense weights + KV cache


def parse_budget(text: str | float) -> Budget:
    """`40%`, `2GiB`, `512MB`, or a share from 0 to 1 (0.4), as a Budget.

    Raises:
      ConfigError: not a number with % or a known unit, or out of range. A whole number
        could be bytes, GB, per cent or a share: it is refused.
    """
    if isinstance(text, (float, np.floating)):
        if not 0 < text <= 1:
            raise ConfigError(
                f"device memory {text} is no share: expected above 0 to 1 (0.25), or a "
                "text (25%, 2GiB)"
            )
        return Budget(share=float(text))
    if not isinstance(text, str):
        raise ConfigError(
            f"device memory {text!r:.40} has no unit; write a share of the expert "
            "bytes (0.25 or '25%') or an amount ('2GiB')"
        )
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|[A-Za-z]+)\s*", text)
    unit = match and match[2]
    if not match or (unit != "%" and unit not in UNITS):
        raise ConfigError(
            f"device memory {text!r} is no budget; write a share of the expert bytes "
            f"(40%) or an amount (2GiB) in {', '.join(UNITS)}"
        )
    number = float(match[1])
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"device memory {text!r}: expected above 0 % to 100 %")
        return Budget(share=number / 100)
    if not 0 < number < math.inf:
        raise ConfigError(f"device memory {text!r} must be positive and finite")
    return Budget(bytes=int(number * UNITS[unit]))


def check_budget(name: str, text: str, kind: str | None, expected: str) -> None:
    """Refuses, by its own name, what is no budget but read as one.

    Args:
      kind: `bytes` or `share`; None: either.
      expected: what the message says.
    """
    try:
        found = parse_budget(text)
    except ConfigError:  # which speaks of device memory
        found = None
    if found is None or (kind and getattr(found, kind) is None):
        raise ConfigError(f"{name} is {text!r}, expected a {expected}")


def slots_for(
    budget: Budget,
    block_bytes: int,
    num_blocks: int,
    other_bytes: int = 0,
    machine_bytes: int | None = None,
    least_slots: int = MIN_SLOTS,
    others: str = "",
) -> int:
    """How many slots a budget buys, at most one for each block.

    Args:
      block_bytes: of one slot.
      num_blocks: routed blocks of the model, all layers.
      other_bytes: what else an absolute budget must hold.
      machine_bytes: memory of the device; None: not checked.
      least_slots: fewer are refused; others: what `other_bytes` are, for the message.
    Raises:
      CapacityError: too few slots (the least budget is said), or more than the machine
        has.
    """
    if budget.share is not None:
        slots = share_of_blocks(budget.share, num_blocks)
        least = f"{_percent_up(least_slots, num_blocks)}% of the expert bytes"
        asked = f"{100 * budget.share:.10g}%"
        needed_bytes = slots * block_bytes + other_bytes
    else:
        slots = max(0, budget.bytes - other_bytes) // block_bytes
        least = f"{other_bytes + least_slots * block_bytes} bytes"
        asked = f"{budget.bytes} bytes"
        needed_bytes = budget.bytes
    if slots < least_slots:
        more = least_slots > MIN_SLOTS
        hint = f" (slot plan one_pool: {MIN_SLOTS})" if more else ""
        beside = ""
        if other_bytes and budget.share is None:
            what = f" ({others})" if others else ""
            beside = f" next to {other_bytes} other bytes{what}"
        raise CapacityError(
            f"device memory of {asked} holds {slots} slots of {block_bytes} bytes"
            f"{beside}; the minimum is {least_slots} slots{hint}, that is {least}"
        )
    if machine_bytes is not None and needed_bytes > machine_bytes:
        raise CapacityError(
            f"device memory of {asked} takes {needed_bytes} bytes, the machine has "
            f"{machine_bytes}; ask for less"
        )
    return min(slots, num_blocks)


def share_of_blocks(share: float, num_blocks: int) -> int:
    """How many slots a share of all blocks is."""
    return int(round(share * num_blocks, 6))  # first: 0.29 * 100 is a little under 29


def _percent_up(part: int, whole: int) -> str:
    """`part` of `whole` in per cent, to four digits, never less than it is."""
    digits = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return f"{digits.divide(decimal.Decimal(100 * part), decimal.Decimal(whole)):f}"
