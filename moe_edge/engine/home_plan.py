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
from moe_edge.offload.budget import MIN_SLOTS, parse_budget, slots_for
from moe_edge.offload.evict_base import CacheSpec
from moe_edge.offload.homes import Homes, homes_by_counts, homes_in_turn
from moe_edge.offload.slot_plan import plan_of, plan_slots, static_hit_curves


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
      context: `profile`, the uses of every expert, decides about fixed homes.
      needs: of the device that runs all but the experts.
      machine_bytes: memory of each device; None: not checked.
    Raises:
      CapacityError: a budget of too few slots on a device, or above the machine.
    """
    moe, layers = config.moe, config.moe_layers
    num_blocks = len(layers) * moe.num_experts
    alone = dataclasses.replace(needs, dense=0, cache=0, shadow=0)
    bought_N = []
    for home, there in enumerate(machine_bytes):
        needed = needs if home == 0 else alone
        bought = slots_for(
            parse_budget(options.device_memory),
            block_bytes,
            num_blocks,
            needed.other_bytes,
            machine_bytes=there,
            least_slots=needs.least_slots,
            others=str(needed),
        )
        bought_N.append(bought)
    counts_LE = context["profile"] if "profile" in context else None
    home_LE, lives_NME = None, np.ones((len(bought_N), len(layers), moe.num_experts))
    if options.homes == "fixed":
        home_LE = _fixed_homes(config, counts_LE, len(bought_N))
        lives_NME = np.stack([home_LE[list(layers)] == n for n in range(len(bought_N))])
        held_N = [int(lives_ME.sum()) for lives_ME in lives_NME]
    else:
        held_N = _shares(bought_N, num_blocks)
    layer_S: list[int] = []
    slots_N = []
    for bought, held, lives_ME in zip(bought_N, held_N, lives_NME, strict=True):
        # A layer has two slots, also where one expert of it lives there.
        total = min(bought, max(needs.least_slots, held))
        most = max(MIN_SLOTS, int(lives_ME.sum(axis=1).max()))
        name, given = options.slot_plan, dict(options.slot_plan_options)
        if counts_LE is not None and "hit_curves" in plan_of(name).from_context:
            own_ME = np.where(lives_ME, counts_LE[list(layers)], 0)
            curves_MS = static_hit_curves(-np.sort(-own_ME, axis=1)[:, :most])
            if home_LE is None:  # all homes together hold so many times as many
                slots_S = np.arange(most + 1) * len(bought_N)
                curves_MS = curves_MS[:, np.minimum(slots_S, most)]
            given["hit_curves"] = curves_MS
        given = context.fill(plan_of(name), given)
        plan = plan_slots(name, total, config.num_layers, most, layers, **given)
        layer_S += plan
        slots_N.append(len(plan))
    spec = CacheSpec(config.num_layers, moe.num_experts, moe.top_k, tuple(layer_S))
    return spec, Homes(home_LE, tuple(slots_N))


def _fixed_homes(config: ModelConfig, counts_LE, homes: int) -> np.ndarray:
    if counts_LE is None:
        return homes_in_turn(config.num_layers, config.moe.num_experts, homes)
    return homes_by_counts(np.asarray(counts_LE), homes)


def _shares(bought_N: Sequence[int], num_blocks: int) -> list[int]:
    """Slots of each home where all together need no more than one a block."""
    shares, left = list(bought_N), num_blocks
    for place, home in enumerate(sorted(range(len(shares)), key=bought_N.__getitem__)):
        shares[home] = min(bought_N[home], -(-left // (len(shares) - place)))
        left -= shares[home]
    return shares
