"""CPU assists: SMoE's two pointers, HybriMoE's two fronts, Fiddler's rule, and all."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.core.plug_in import register
from moe_edge.offload.assist_base import Assist, AssistCosts


@register
@dataclasses.dataclass(frozen=True)
class All(Assist):
    """The host computes all that is absent; nothing travels in decoding."""

    name = "all"
    takes_last = True
    SOURCE = "llama.cpp with experts on the CPU, plus a cache"

    def take(self, absent, ids_TK, costs: AssistCosts):
        return absent


@register
@dataclasses.dataclass(frozen=True)
class TwoPointer(Assist):
    """The best scores travel, the worst are computed, until both sides meet."""

    name = "two_pointer"
    takes_last = True
    SOURCE = "SMoE, algorithm 2"

    def take(self, absent, ids_TK, costs: AssistCosts):
        return plan_two_pointer(absent, costs.load_s, costs.host_s)[1]


@register
@dataclasses.dataclass(frozen=True)
class TwoFront(Assist):
    """The busiest travel, the idlest are computed, whoever would be done earlier."""

    name = "two_front"
    SOURCE = "HybriMoE, arXiv 2504.05897, intra-layer scheduling"

    def take(self, absent, ids_TK, costs: AssistCosts):
        tokens = [int(np.count_nonzero(ids_TK == expert)) for expert in absent]
        return plan_two_front(absent, tokens, costs.load_s, costs.host_s)[1]


@register
@dataclasses.dataclass(frozen=True)
class Fiddler(Assist):
    """The host computes where that is faster than a transfer and the device.

    At the few tokens of decoding an expert costs the same for all of them (SMoE,
    fig. 8): each counts once.
    """

    name = "fiddler"
    takes_last = True
    SOURCE = "Fiddler, arXiv 2402.07033"

    def take(self, absent, ids_TK, costs: AssistCosts):
        ones = np.ones(len(absent), np.int64)
        times = costs.host_s, costs.load_s, costs.device_s
        on_host = plan_fiddler(ones, *times)
        return [expert for expert, here in zip(absent, on_host, strict=True) if here]


def plan_two_pointer(
    experts: Sequence[int], load_s: float, cpu_s: float
) -> tuple[list[int], list[int]]:
    """Splits absent experts between the link and the CPU.

    From the head of the list while the link would be done first, else from the tail.
    The longer side exceeds the best split's by less than one expert of that side.
    A single expert always travels, whatever the costs, as in the paper.

    Args:
      experts: absent experts, best score first.
      load_s: to transfer one, seconds.
      cpu_s: to compute one on the CPU, seconds.
    Returns:
      (to load, best first; to compute, worst first).
    Source: SMoE, algorithm 2.
    """
    load_total_s = cpu_total_s = 0.0
    first, last = 0, len(experts)
    while first < last:
        if load_total_s <= cpu_total_s:
            load_total_s += load_s
            first += 1
        else:
            cpu_total_s += cpu_s
            last -= 1
    return list(experts[:first]), list(experts[last:])[::-1]


def plan_fiddler(
    tokens_E: np.ndarray, cpu_token_s: float, copy_s: float, gpu_s: float
) -> np.ndarray:
    """Which absent experts the CPU computes: where that is faster than fetching.

    Args:
      tokens_E: int, tokens of each absent expert.
      cpu_token_s: one token of one expert on the CPU.
      copy_s, gpu_s: to transfer one expert, and to run it on the device.
    Returns:
      bool, like `tokens_E`.
    Source: Fiddler, arXiv 2402.07033.
    """
    return np.asarray(tokens_E) * cpu_token_s < copy_s + gpu_s


def plan_two_front(
    experts: Sequence[int], tokens: Sequence[int], load_s: float, cpu_s: float
) -> tuple[list[int], list[int]]:
    """Splits absent experts, the busiest for the link and the idlest for the CPU.

    Each front takes its next expert when it would be done with that one earlier than
    the other front with its own; where both would be done at once the link takes it.

    Args:
      experts: absent experts, best score first.
      tokens: of each, tokens that chose it.
      load_s: to transfer one, seconds.
      cpu_s: to compute one on the CPU, seconds.
    Returns:
      (to load, busiest first; to compute, idlest first).
    Source: HybriMoE, arXiv 2504.05897, intra-layer scheduling, without its third step,
    by which an idle CPU takes cached experts from a busy GPU.
    """
    by_load = [
        expert
        for _, expert in sorted(
            zip(tokens, experts, strict=True), key=lambda pair: -pair[0]
        )
    ]
    load_total_s = cpu_total_s = 0.0
    first, last = 0, len(by_load)
    while first < last:
        if load_total_s + load_s <= cpu_total_s + cpu_s:
            load_total_s += load_s
            first += 1
        else:
            cpu_total_s += cpu_s
            last -= 1
    return by_load[:first], by_load[last:][::-1]
