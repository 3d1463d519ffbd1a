"""A layer in waves: its chosen experts pass through fewer slots than they are.

Prefill goes expert by expert over all tokens that need it: while one group of experts
is computed, the next group travels into other slots. Decoding with very few slots
follows the order of the (token, expert) pairs, so that sums keep their order.
"""

import jax
import numpy as np

from moe_edge.engine.layer_exchange import Arrays
from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.routing_reader import Reading
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.layer_visit import LayerVisit
from moe_edge.offload.slot_cache import MAX_GROUP


class LayerWaves:
    """Runs the experts of a layer in waves.

    Args:
      exchange: calls the programs of waves.
      asks_first: the next group is asked for before a group is computed, not after its
        program was dispatched: for programs that run in the calling thread.
    """

    def __init__(
        self,
        programs: LayerPrograms,
        layer_step: LayerStep,
        exchange: Arrays,
        asks_first: bool,
    ):
        self._programs, self._exchange = programs, exchange
        self._layer_step, self._residency = layer_step, layer_step.residency
        self._cache, self._spec = layer_step.cache, layer_step.spec
        queue = layer_step.queue
        self._slots = queue.slots
        self._asks_first = asks_first
        self.last = None  # output of the last program here that reads slots

    def run(self, routed: Routed, reading: Reading, visit: LayerVisit):
        """The residual stream after the experts."""
        if isinstance(reading.weights_TK, np.ndarray):  # a route changed the choice
            routing = routed.routing._replace(ids_TK=reading.ids_TK)
            routed = routed._replace(routing=routing)
        carry = self._exchange.start(routed, reading)
        # Homes keep rows of pairs, which have no order.
        has_homes = self._cache.homes is not None
        if self._programs.is_pairs(len(reading.ids_TK)) and not has_homes:
            carry = self._segments(carry, routed, reading, visit)
        else:
            carry = self._groups(carry, routed, reading, visit)
        return self._exchange.finish(routed, reading, carry)

    def _wave(self, carry, routed, reading, slot_of):
        given = carry, routed, reading, self._slots.array, slot_of
        carry, self.last = self._exchange.wave(*given)
        return carry, self.last

    def _groups(self, carry, routed, reading, visit):
        """Groups of experts: first those that are here, the next ones meanwhile."""
        layer_step, spec, cache = self._layer_step, self._spec, self._cache
        layer_step.begin_waves(visit)
        row, chosen = cache.rows[visit.layer], visit.chosen
        group, transfers = [expert for expert in chosen if row[expert] >= 0], []
        absent = [expert for expert in chosen if row[expert] < 0]
        # By fixed home: what it has still to get, and how much of it at once.
        lefts = [list(part) for part in cache.by_home(visit.layer, absent)]
        links = 1 if cache.homes is None else len(cache.homes)
        rooms = cache.rooms(visit.layer)
        most = MAX_GROUP * links // len(rooms)
        sizes = [max(1, min(most, room // 2)) for room in rooms]
        busy, last = [], None

        def ask():
            # The lookup protects what it found; from here the waves do.
            cache.release()
            asked = []
            for left, size in zip(lefts, sizes, strict=True):
                found = layer_step.demand(visit, left[:size], busy)
                del left[: len(found)]
                asked += found
            return asked

        while group or any(lefts):
            coming = []
            if group:
                layer_step.wait(visit, transfers)
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
            if not coming and any(lefts):
                jax.block_until_ready(last)
                busy = []
                coming = ask()
            group, transfers = [transfer.expert for transfer in coming], coming
        jax.block_until_ready(last)
        return carry

    def _segments(self, carry, routed, reading, visit):
        """Runs of pairs whose experts fit the slots, one after another."""
        ids_P = reading.ids_TK.reshape(-1)
        for first, end in self._layer_step.runs(visit, reading.ids_TK):
            slot_P = np.full(ids_P.shape, self._spec.num_slots, np.int32)
            slot_P[first:end] = self._residency.slots(visit.layer, ids_P[first:end])
            slot_TK = slot_P.reshape(reading.ids_TK.shape)
            carry, done = self._wave(carry, routed, reading, slot_TK)
            done.block_until_ready()
        return carry
