"""A layer in waves: its chosen experts pass through fewer slots than they are.

Prefill goes expert by expert over all tokens that need it: while one group of experts
is computed, the next group travels into other slots. Decoding with very few slots
follows the order of the (token, expert) pairs, so that sums keep their order.
"""

import jax
import numpy as np

from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.routing_reader import Reading
from moe_edge.offload.layer_visit import LayerVisit
from moe_edge.offload.manager import OffloadManager

MAX_GROUP = 8  # experts of a wave: more overlap worse, fewer cost more dispatches


class LayerWaves:
    """Runs the experts of a layer in waves.

    Args:
      asks_first: the next group is asked for before a group is computed, not after its
        program was dispatched: for programs that run in the calling thread.
    """

    def __init__(
        self, programs: LayerPrograms, manager: OffloadManager, asks_first: bool
    ):
        self._programs, self._manager = programs, manager
        self._asks_first = asks_first
        self.last = None  # output of the last program here that reads slots

    def run(self, routed: Routed, reading: Reading, visit: LayerVisit):
        """The residual stream after the experts."""
        if isinstance(reading.weights_TK, np.ndarray):  # a route changed the choice
            routing = routed.routing._replace(ids_TK=reading.ids_TK)
            routed = routed._replace(routing=routing)
        carry = self._programs.start(routed)
        if self._programs.is_pairs(len(reading.ids_TK)):
            carry = self._segments(carry, routed, reading, visit)
        else:
            carry = self._groups(carry, routed, reading, visit)
        return self._programs.finish(routed, carry, reading.weights_TK)

    def _wave(self, carry, routed, reading, slot_of):
        slots = self._manager.queue.slots
        carry, self.last = self._programs.wave(
            carry, routed, reading.weights_TK, slots.array, slot_of
        )
        return carry, self.last

    def _groups(self, carry, routed, reading, visit):
        """Groups of experts: first those that are here, the next ones meanwhile."""
        visit.begin_waves()
        spec, residency = self._manager.spec, self._manager.residency
        row = residency.cache.rows[visit.layer]
        chosen = [*visit.hits, *visit.late, *visit.misses]
        group = [expert for expert in chosen if row[expert] >= 0]
        left, transfers = [expert for expert in chosen if row[expert] < 0], []
        size = max(1, min(MAX_GROUP, residency.cache.room_L[visit.layer] // 2))
        busy, last = [], None

        def ask():
            # The lookup protects what it found; from here the waves do.
            visit.release()
            return visit.demand(left[:size], busy)

        while group or left:
            coming = []
            if group:
                visit.wait(transfers)
                busy = [row[expert] for expert in group]
                if self._asks_first:
                    jax.block_until_ready(last)
                    coming = ask()
                slot_E = np.full(spec.num_experts, spec.num_slots, np.int32)
                slot_E[group] = busy
                carry, done = self._wave(carry, routed, reading, slot_E)
                jax.block_until_ready(last)  # its slots are about to be written
                last = done
            coming = coming or ask()
            if not coming and left:
                last.block_until_ready()
                busy = []
                coming = ask()
            group, left, transfers = left[: len(coming)], left[len(coming) :], coming
        jax.block_until_ready(last)
        return carry

    def _segments(self, carry, routed, reading, visit):
        """Runs of pairs whose experts fit the slots, one after another."""
        residency = self._manager.residency
        ids_P = reading.ids_TK.reshape(-1)
        for first, end in visit.runs(reading.ids_TK):
            slot_P = np.full(ids_P.shape, self._manager.spec.num_slots, np.int32)
            slot_P[first:end] = residency.slots(visit.layer, ids_P[first:end])
            slot_TK = slot_P.reshape(reading.ids_TK.shape)
            carry, done = self._wave(carry, routed, reading, slot_TK)
            done.block_until_ready()
        return carry
