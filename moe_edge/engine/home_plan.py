"""How experts and slots are shared out among several devices, each a home.

The budget counts for each device: with as many per cent, two devices hold twice as many
experts. Next to its slots every device has staging, and the first one all that runs
there: dense weights, KV cache, a shadow.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.core.context import Context
from moe_edge.engine.device_needs import DeviceNeeds
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.model.config import ModelConfig
from moe_edge.offload.evict_base import CacheSpec
from moe_edge.offload.homes import Homes, homes_by_counts, homes_in_turn
from moe_edge.offload.slot_plan import (
    MIN_SLOTS,
    parse_budget,
    plan_of,
    plan_slots,
    slots_for,
    static_hit_curves,
)


def plan_homes(
    options: OffloadOptions,
    config: ModelConfig,
    context: Context,
    block_bytes: int,
    needs: DeviceNeeds,
    machine_bytes: Sequence[int | None],
) -> tuple[CacheSpec, Homes]:
    """Slots that the budget buys on each device, and who lives there.

    Args:
      context: `profile`, the uses of every expert, decides about homes if it is there.
      needs: of the device that runs all but the experts.
      machine_bytes: memory of each device; None: not checked.
    Raises:
      CapacityError: a budget of too few slots on a device, or above the machine.
    """
    N, moe, layers = len(machine_bytes), config.moe, config.moe_layers
    counts_LE = context["profile"] if "profile" in context else None
    if counts_LE is None:
        home_LE = homes_in_turn(config.num_layers, moe.num_experts, N)
    else:
        home_LE = homes_by_counts(np.asarray(counts_LE), N)
    alone = dataclasses.replace(needs, dense=0, cache=0, shadow=0)
    layer_S: list[int] = []
    slots_N = []
    for home in range(N):
        needed = needs if home == 0 else alone
        own_ME = home_LE[list(layers)] == home
        # A layer has two slots, also where one expert of it lives there.
        most = max(MIN_SLOTS, int(own_ME.sum(axis=1).max()))
        total = slots_for(
            parse_budget(options.device_memory),
            block_bytes,
            len(layers) * moe.num_experts,
            needed.other_bytes,
            machine_bytes=machine_bytes[home],
            least_slots=needs.least_slots,
            others=str(needed),
        )
        total = min(total, max(needs.least_slots, int(own_ME.sum())))
        name, given = options.slot_plan, dict(options.slot_plan_options)
        if counts_LE is not None and "hit_curves" in plan_of(name).from_context:
            own_counts_ME = np.where(own_ME, counts_LE[list(layers)], 0)
            most_used_ME = -np.sort(-own_counts_ME, axis=1)[:, :most]
            given["hit_curves"] = static_hit_curves(most_used_ME)
        given = context.fill(plan_of(name), given)
        plan = plan_slots(name, total, config.num_layers, most, layers, **given)
        layer_S += plan
        slots_N.append(len(plan))
    spec = CacheSpec(config.num_layers, moe.num_experts, moe.top_k, tuple(layer_S))
    return spec, Homes(home_LE, tuple(slots_N))
