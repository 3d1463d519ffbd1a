"""From slots to layers: which layer each slot belongs to.

A plan returns layer_S, the layer each slot belongs to (-1: any), as CacheSpec takes
it. `one_pool` shares all slots; the others give each MoE layer its own, side by side.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from moe_edge.core.checks import (
    CapacityError,
    ConfigError,
    check_count,
    check_known,
    check_shape,
)
from moe_edge.offload.budget import MIN_SLOTS


def least_slots(
    name: str, num_experts: int, num_layers: int, options: Mapping[str, Any]
) -> int:
    """The fewest slots that the plan called `name` can share out.

    Args:
      num_layers: that have experts.
      options: of the plan; wrong ones are for `plan_slots` to refuse.
    """
    if name in ("auto", "one_pool"):
        return MIN_SLOTS
    least = MIN_SLOTS * num_layers
    slots = options.get("slots") if name == "planned" else None
    if not isinstance(slots, list | tuple | np.ndarray) or len(slots) != num_layers:
        return least
    whole = all(isinstance(count, int | np.integer) for count in slots)
    fits = whole and all(MIN_SLOTS <= count <= num_experts for count in slots)
    return sum(map(int, slots)) if fits else least


def plan_of(name: str) -> "SlotPlan":
    """What a plan needs; `auto` becomes one that needs nothing."""
    check_known("slot plan", name, ("auto", *PLANS))
    return PLANS["equal" if name == "auto" else name]


def plan_slots(
    name: str, total: int, num_layers: int, num_experts: int, moe_layers, **options
) -> tuple[int, ...]:
    """layer_S of the plan called `name`.

    Args:
      total: slots to hand out; at most num_experts a layer are used.
      moe_layers: the layers that have experts, ascending.
      options: of the plan (see its function).
    Raises:
      ConfigError: unknown plan or options that do not fit.
      CapacityError: fewer than two slots for some layer.
    """
    M, least = len(moe_layers), MIN_SLOTS * len(moe_layers)
    if name == "auto":
        # Layers come in turn, so least recently used in one pool throws out exactly
        # what the next token needs; a few slots, though, serve best together.
        name = "equal" if total >= least else "one_pool"
    make = plan_of(name).make
    known = list(inspect.signature(make).parameters.values())[3:]
    for option in options:
        check_known(f"option of slot plan {name}", option, [p.name for p in known])
    missing = [p.name for p in known if p.default is p.empty and p.name not in options]
    if missing:
        raise ConfigError(
            f"slot plan {name} got no {', '.join(missing)}; give it in "
            "slot_plan_options, or use the plan auto"
        )
    if name == "one_pool":
        return (-1,) * one_pool(total, num_experts, moe_layers, **options)
    slots_M = make(total, num_experts, moe_layers, **options)
    if len(slots_M) != M or max(slots_M) > num_experts:
        raise ConfigError(
            f"plan {name} gives {list(slots_M)}; expected {M} numbers, one a MoE "
            f"layer, none above {num_experts}"
        )
    if min(slots_M) < MIN_SLOTS or sum(slots_M) > total:
        raise CapacityError(
            f"plan {name} gives {list(slots_M)} of {total} slots; every layer needs "
            f"{MIN_SLOTS}, {least} in all: raise the budget or use the plan one_pool"
        )
    if moe_layers[-1] >= num_layers:
        raise ConfigError(f"MoE layer {moe_layers[-1]} of only {num_layers} layers")
    return tuple(int(layer) for layer in np.repeat(moe_layers, slots_M))


def one_pool(total: int, num_experts: int, moe_layers) -> int:
    """Number of slots that all layers share."""
    if total < MIN_SLOTS:
        raise CapacityError(f"{total} slots; the minimum is {MIN_SLOTS}")
    return min(total, num_experts * len(moe_layers))


def equal(total: int, num_experts: int, moe_layers) -> list[int]:
    """The same number for each layer; the first ones take the remainder."""
    base, extra = divmod(total, len(moe_layers))
    return [min(base + (i < extra), num_experts) for i in range(len(moe_layers))]


def planned(total: int, num_experts: int, moe_layers, slots) -> list[int]:
    """The given numbers, one a MoE layer."""
    if not isinstance(slots, list | tuple | np.ndarray):
        raise ConfigError(
            f"slots of plan planned is {slots!r}, expected a list of numbers, one for "
            f"each of {len(moe_layers)} MoE layers"
        )
    slots = slots.tolist() if isinstance(slots, np.ndarray) else list(slots)
    for count in slots:
        check_count("slots of a layer", count)
    return slots


def static_hit_curves(counts_LE) -> np.ndarray:
    """Hit ratio of a layer's s most used experts, s = 0..E: [L, E + 1].

    Args:
      counts_LE: uses of every expert; a layer without any counts as uniform.
    """
    counts_LE = np.asarray(counts_LE, np.float64)
    counts_LE = np.where(counts_LE.sum(1, keepdims=True) > 0, counts_LE, 1)
    share_LE = -np.sort(-counts_LE, axis=1) / counts_LE.sum(1, keepdims=True)
    return np.pad(np.cumsum(share_LE, axis=1), ((0, 0), (1, 0)))


def adapmoe_dp(
    total: int,
    num_experts: int,
    moe_layers,
    hit_curves,
    top_k: int,
    prefetch_accuracy=0.0,
    single_share=0.0,
) -> list[int]:
    """Slots per layer with the least expected misses a token, by dynamic programming.

    Expected misses of layer l with s slots:
    (1 - a_l) * (r_l + (1 - r_l) * top_k) * (1 - hit_l(s)).

    Args:
      hit_curves: [M, E + 1] hit ratio of each MoE layer at 0..E slots, measured
        (replay) or from counts (static_hit_curves).
      prefetch_accuracy: a_l, scalar or [M]: share of the misses that are prefetched.
      single_share: r_l, scalar or [M]: share of tokens that run one expert only.
    Source: AdapMoE, cache allocation. Differs: the page we work from does not state its
      hit probability; with uniform use it is linear in s and all slots would go to one
      layer after the other, so measured curves stand in its place.
    """
    M = len(moe_layers)
    curves = np.asarray(hit_curves, np.float64)
    check_shape("hit_curves", curves, (M, num_experts + 1))
    used_M = single_share + (1 - np.asarray(single_share)) * top_k
    weight_M = np.broadcast_to((1 - np.asarray(prefetch_accuracy)) * used_M, (M,))
    misses = weight_M[:, None] * (1 - curves)
    total = min(total, M * num_experts)
    if total < MIN_SLOTS * M:
        return equal(total, num_experts, moe_layers)  # refused by plan_slots

    best = np.full(total + 1, np.inf)  # least misses of the layers so far, by slots
    best[0] = 0
    choice = np.zeros((M, total + 1), np.int32)
    for layer in range(M):
        new = np.full(total + 1, np.inf)
        for count in range(MIN_SLOTS, min(num_experts, total) + 1):
            cost = best[: total + 1 - count] + misses[layer, count]
            better = cost < new[count:]
            new[count:][better] = cost[better]
            choice[layer, count:][better] = count
        best = new
    slots, left = [], total
    for layer in reversed(range(M)):
        slots.append(int(choice[layer, left]))
        left -= slots[-1]
    return slots[::-1]


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """A way to share slots out.

    Attributes:
      make: the function; its options follow the first three arguments.
      needs: what it must know of a run, as policies say it.
      from_context: which options come from where (core/context.py).
    """

    make: Callable
    needs: Collection[str] = ()
    from_context: Mapping[str, str] = dataclasses.field(default_factory=dict)


PLANS = {
    "one_pool": SlotPlan(one_pool),
    "equal": SlotPlan(equal),
    "planned": SlotPlan(planned),
    "adapmoe_dp": SlotPlan(
        adapmoe_dp, {"profile"}, {"hit_curves": "hit_curves", "top_k": "top_k"}
    ),
}
