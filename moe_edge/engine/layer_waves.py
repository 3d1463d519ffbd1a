"""A layer in waves: its chosen experts pass through fewer slots than they are.

Prefill goes expert by expert over all tokens that need it: while one group of experts
is computed, the next group travels into other slots. Decoding with very few slots
follows the order of the (token, expert) pairs, so that sums keep their order.
"""

import numpy as np

from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.offload.manager import OffloadManager

MAX_GROUP = 8  # experts of a wave: more overlap worse, fewer cost more dispatches


class LayerWaves:
    """Runs the experts of a layer in waves.

    Args:
      programs: of the model.
      manager: brings experts into slots.
    """

    def __init__(self, programs: LayerPrograms, manager: OffloadManager):
        self._programs, self._manager = programs, manager

    def run(self, layer: int, routed: Routed, choice, step: int, is_decode: bool):
        """(residual stream after the experts, seconds waited for transfers)."""
        self._manager.drain()
        if isinstance(choice.weights_TK, np.ndarray):  # a route changed the choice
            routing = routed.routing._replace(ids_TK=choice.ids_TK)
            routed = routed._replace(routing=routing)
        tokens = choice.ids_TK.shape[0]
        carry = self._programs.start(routed)
        if self._programs.waves(tokens).method == "pairs":
            carry, waited_s = self._segments(
                carry, layer, routed, choice, step, is_decode
            )
        else:
            carry, waited_s = self._groups(
                carry, layer, routed, choice, step, is_decode
            )
        return self._programs.finish(routed, carry, choice.weights_TK), waited_s

    def _wave(self, carry, routed, choice, slot_of):
        slots = self._manager.queue.slots
        return self._programs.wave(
            carry, routed, choice.weights_TK, slots.array, slot_of
        )

    def _groups(self, carry, layer, routed, choice, step, is_decode):
        """Groups of experts: first those that are here, the next ones meanwhile."""
        manager, spec = self._manager, self._manager.spec
        slot_E = manager.cache.slot_LE[layer]
        chosen = [int(expert) for expert in (*choice.hits, *choice.misses)]
        group = [expert for expert in chosen if slot_E[expert] >= 0]
        left, transfers = [expert for expert in chosen if slot_E[expert] < 0], []
        waited_s, busy, last = 0.0, [], None
        while group or left:
            if group:
                waited_s += manager.wait(transfers, layer, step, is_decode)
                slot_E = np.full(spec.num_experts, spec.num_slots, np.int32)
                slot_E[group] = manager.cache.slot_LE[layer, group]
                busy = slot_E[group].tolist()
                carry, done = self._wave(carry, routed, choice, slot_E)
                if last is not None:
                    last.block_until_ready()  # its slots are about to be written
                last = done
            # The lookup protects what it found; from here the waves do.
            manager.cache.release()
            size = max(1, min(MAX_GROUP, manager.room(layer) // 2))
            transfers = manager.fetch(layer, left[:size], step, busy)
            if not transfers and left:
                last.block_until_ready()
                busy = []
                transfers = manager.fetch(layer, left[:size], step, busy)
            group, left = left[: len(transfers)], left[len(transfers) :]
        if last is not None:
            last.block_until_ready()
        return carry, waited_s

    def _segments(self, carry, layer, routed, choice, step, is_decode):
        """Runs of pairs whose experts fit the slots, one after another."""
        manager, spec = self._manager, self._manager.spec
        ids_P = choice.ids_TK.reshape(-1)
        waited_s = 0.0
        for first, end in segments(ids_P, spec.num_experts, manager.room(layer)):
            experts = np.unique(ids_P[first:end])
            experts = experts[experts < spec.num_experts]
            slot_E = manager.cache.slot_LE[layer]
            here = slot_E[experts[slot_E[experts] >= 0]].tolist()
            manager.cache.release()
            absent = [int(expert) for expert in experts if slot_E[expert] < 0]
            transfers = manager.fetch(layer, absent, step, here)
            if len(transfers) < len(absent):
                raise RuntimeError(f"layer {layer}: {len(absent)} experts got no slots")
            waited_s += manager.wait(transfers, layer, step, is_decode)
            slot_P = np.full(ids_P.shape, spec.num_slots, np.int32)
            own_P = manager.slots_TK(layer, ids_P[first:end])
            slot_P[first:end] = own_P
            slot_TK = slot_P.reshape(choice.ids_TK.shape)
            carry, done = self._wave(carry, routed, choice, slot_TK)
            done.block_until_ready()
        return carry, waited_s


def segments(ids_P: np.ndarray, num_experts: int, room: int) -> list[tuple[int, int]]:
    """Cuts pairs into contiguous runs of at most `room` distinct experts each.

    Args:
      ids_P: experts of the pairs in order; num_experts and more are no experts.
      room: slots.
    Returns:
      (first, end) of every run, covering all pairs.
    """
    runs, seen, first = [], set(), 0
    for place, expert in enumerate(ids_P.tolist()):
        if expert >= num_experts or expert in seen:
            continue
        if len(seen) == room:
            runs.append((first, place))
            seen, first = set(), place
        seen.add(expert)
    runs.append((first, len(ids_P)))
    return runs
