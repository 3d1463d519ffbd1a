"""Host bookkeeping of the slots: which block is where, what is missing, who goes.

No bytes move here. The experts of the running lookup are never victims: `look_up`
remembers them until the next `look_up` or `release`. What else must stay (slots that
transfers or earlier programs still use) the caller says through `kept`.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import is_ours
from moe_edge.offload.evict_base import CacheSpec, Eviction, State, put
from moe_edge.offload.evict_checks import check_state, check_value, checked_victim
from moe_edge.offload.homes import Homes
from moe_edge.offload.lookup_runs import cut_runs
from moe_edge.offload.slot_rooms import SlotRooms

# Experts of a prefill's wave: more overlap worse, fewer cost more dispatches.
MAX_GROUP = 8
NOBODY = -1  # the sequence of a record that no lookup has begun yet


class Lookup(NamedTuple):
    """The distinct experts of one lookup."""

    hits: list[int]  # resident
    misses: list[int]  # in the order to load them: best score first


class SlotCache(SlotRooms):
    """One cache over the slots of `spec`, evicting by `policy`.

    A policy whose record is one sequence's only has a record for every sequence that
    lookups name (rows that are decoded together share one): the running one decides
    who goes, and the blocks are everybody's.

    Where experts have fixed homes, a block only enters slots of its home, and a layer
    fits if every home holds what was chosen of it. With free homes it goes where the
    fewest blocks have gone since the lookup, so that links share the work.

    slot_LE: int32 [L, E], the slot of a block or -1. Read it, never write it.
    rows: the same as lists by layer, with a last -1 for the padding id: for the few
      experts of a lookup several times faster than an array, and Python keeps its lock
      meanwhile, for which the queue's thread may be waiting.
    """

    def __init__(self, spec: CacheSpec, policy: Eviction, homes: Homes | None = None):
        super().__init__(spec, homes)
        self.policy = policy
        self._home_at = [] if homes is None else homes.home_S.tolist()
        self._entered_N = [0] * (1 if homes is None else len(homes))  # since a lookup
        self._is_foreign = not is_ours(policy)
        self.slot_LE = np.full((spec.num_layers, spec.num_experts), -1, np.int32)
        self.rows = [[-1] * (spec.num_experts + 1) for _ in range(spec.num_layers)]
        self.restart()

    def fits(self, layer: int, experts: Sequence[int]) -> bool:
        """Whether slots hold all these experts at once."""
        if self._fixed is None:
            return len(experts) <= self.room_L[layer]
        parts = zip(self.by_home(layer, experts), self.rooms(layer), strict=True)
        return all(len(part) <= room for part, room in parts)

    def resident(self, layer: int) -> np.ndarray:
        """bool [E]: the experts of the layer that are in slots."""
        return self.slot_LE[layer] >= 0

    def look_up(
        self, layer: int, ids_TK, scores_TE, step: int, sequence: int = 0
    ) -> Lookup:
        """Refreshes the chosen experts and says which of them are in slots.

        Args:
          ids_TK: int32 NumPy array, best first; id E is padding.
          scores_TE: float32 gate scores, or None if the policy does not need them;
            then misses are ordered by their best rank over the tokens.
          step: see Eviction.touch.
          sequence: whose record goes on, of a policy with one for each.
        """
        chosen = _distinct(ids_TK, scores_TE, self.spec.num_experts)
        if self.policy.per_sequence and sequence != self._sequence:
            self._turn_to(sequence)
        if self._first_step is None:
            self._first_step = step
        before_S = self.state["key_S"].copy() if self.policy.forgets else None
        self.state = self.policy.touch(
            self.state, layer, ids_TK, scores_TE, step - self._first_step
        )
        if self._is_foreign:
            check_state(self.policy, "touch", self.state)
        if before_S is not None:
            self._let_go(before_S)
        row, hits, misses = self.rows[layer], [], []
        for expert in chosen:
            (misses if row[expert] < 0 else hits).append(expert)
        self._running_slots = {row[expert] for expert in hits}
        self._entered_N = [0] * len(self._entered_N)
        self._running_layer, self._running = layer, set(chosen)
        self._order = None
        return Lookup(hits, misses)

    def release(self) -> None:
        """The experts of the running lookup are computed: they may be victims again.

        `look_up` does this for the one before it; call it between the waves of a
        layer that has more chosen experts than slots.
        """
        self._running_slots: set[int] = set()
        self._running_layer, self._running = -1, set()
        self._order = None

    def runs(
        self, layer: int, ids_TK
    ) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """Cuts the pairs of a lookup that exceeds its slots into runs that fit.

        Yields:
          (first, end) of a run of pairs, its absent experts, which the caller admits,
          and the slots of the others, which must keep what they hold.
        """
        row, ids_P, E = self.rows[layer], ids_TK.reshape(-1), self.spec.num_experts
        for first, end in cut_runs(ids_P, E, self.room_L[layer]):
            experts = sorted({e for e in ids_P[first:end].tolist() if e < E})
            self.release()
            absent = [expert for expert in experts if row[expert] < 0]
            yield first, end, absent, [row[e] for e in experts if row[e] >= 0]

    def admit(
        self, layer: int, expert: int, kept: Collection[int] | None = None
    ) -> int | None:
        """Gives a block a slot, evicting if none is empty.

        Args:
          kept: slots that must keep what they hold, in addition to those of the running
            lookup. Who says so also keeps what is admitted until the next lookup.
        Returns:
          The slot (the block's own if it is resident), or None if every slot that
          may hold the layer is kept.
        """
        expert = int(expert)
        slot = self.rows[layer][expert]
        if slot >= 0:
            return slot
        for homes in self._open_homes(layer, expert):
            slot, state = self._give_up(layer, kept or (), homes)
            if slot is not None:
                break
        else:
            return None
        if self.homes is not None:
            self._entered_N[self._home_at[slot]] += 1
        self._forget(int(state["key_S"][slot]))
        self.state = put(state, slot, layer * self.spec.num_experts + expert)
        self._note(layer, expert, slot)
        if layer == self._running_layer and expert in self._running:
            self._running_slots.add(slot)
        elif kept is None:
            self._order = None  # it may be the next to go
        return slot

    def _open_homes(self, layer: int, expert: int) -> list[Collection[int] | None]:
        """Where a block may go: homes, in groups, best first; None: anywhere."""
        if self.homes is None:
            return [None]
        if self._fixed is not None:
            return [{self.room_of(layer, expert)}]
        entered_N = self._entered_N
        groups = sorted(set(entered_N))
        return [
            {n for n, so_far in enumerate(entered_N) if so_far == g} for g in groups
        ]

    def _give_up(
        self, layer: int, kept: Collection[int], homes: Collection[int] | None
    ) -> tuple[int | None, State]:
        """The slot to give up, if there is one, and the state from then on."""
        if type(self.policy).victim is Eviction.victim:  # the first of its order
            slot = self._victim(layer, kept, homes)
            if slot is None:
                return None, self.state
            return slot, self.policy.gave_up(self.state, slot)
        protected_S = np.ones(self.spec.num_slots, bool)
        protected_S[self._slots_L[layer]] = False
        if homes is not None:
            protected_S |= ~np.isin(self.homes.home_S, list(homes))
        protected_S[[*self._running_slots, *kept]] = True
        if protected_S.all():
            return None, self.state
        found = self.policy.victim(self.state, protected_S)
        return checked_victim(self.policy, found, protected_S, self._is_foreign)

    def _victim(
        self, layer: int, kept: Collection[int], homes: Collection[int] | None
    ) -> int | None:
        """The slot to give up; it has left the order."""
        part, running = self._slots_L[layer], self._running_slots
        if self._order is None or self._order[0] is not part:
            if self._is_foreign:
                check_value(self.policy, self.state)
            if len(part) == self.spec.num_slots:
                order = self.policy.order(self.state)
            else:
                seen = {**self.state, "key_S": self.state["key_S"][part]}
                order = part[self.policy.order(seen)]
            self._order = part, order.tolist()
        order = self._order[1]
        for place, slot in enumerate(order):
            if homes is not None and self._home_at[slot] not in homes:
                continue
            if slot not in running and slot not in kept:
                del order[place]
                return slot
        return None

    def drop(self, layer: int, expert: int) -> None:
        """The block is not in its slot after all (a cancelled transfer)."""
        slot = self.rows[layer][expert]
        if slot < 0:
            raise ConfigError(f"layer {layer} expert {expert} is in no slot: no drop")
        self._note(layer, expert, -1)
        self._running_slots.discard(slot)
        self.state = put(self.state, slot, -1)
        self._order = None

    def _turn_to(self, sequence: int) -> None:
        """Goes on with the record of another sequence, or begins one."""
        records, key_S = self._records, self.state["key_S"]
        records[self._sequence] = self._first_step, self.state
        if sequence not in records:
            fresh = records.pop(NOBODY, None) or (None, self.policy.init(self.spec))
            records[sequence] = fresh
        self._sequence, (self._first_step, state) = sequence, records.pop(sequence)
        self.state = self.policy.resume({**state, "key_S": key_S})
        self._order = None

    def finish_sequences(self, running: Collection[int] = ()) -> None:
        """Ends the records of all but the running; the blocks stay where they are."""
        if not self.policy.per_sequence:
            return
        if self._sequence not in running:
            self._turn_to(NOBODY)
        self._records = {n: r for n, r in self._records.items() if n in running}

    def empty(self) -> None:
        """Takes every block out of its slot; the sequences' records end."""
        for layer, expert in np.argwhere(self.slot_LE >= 0).tolist():
            self.drop(layer, expert)
        self.finish_sequences()

    def restart(self) -> None:
        """Every slot is empty, and the policy has seen nothing."""
        for layer, expert in np.argwhere(self.slot_LE >= 0).tolist():
            self._note(layer, expert, -1)
        self.release()
        self.state, self._sequence = self.policy.init(self.spec), NOBODY
        self._records: dict[int, tuple[int | None, State]] = {}
        # Steps of a policy with a record per sequence count from its first lookup.
        self._first_step: int | None = None if self.policy.per_sequence else 0

    def _forget(self, key: int) -> None:
        if key >= 0:
            self._note(*divmod(key, self.spec.num_experts), -1)

    def _note(self, layer: int, expert: int, slot: int) -> None:
        self.slot_LE[layer, expert] = slot
        self.rows[layer][expert] = slot

    def _let_go(self, before_S: np.ndarray) -> None:
        """Follows a policy that has emptied slots itself."""
        for slot in np.flatnonzero(self.state["key_S"] != before_S).tolist():
            self._forget(int(before_S[slot]))


def _distinct(ids_TK, scores_TE, num_experts: int) -> list[int]:
    """The experts of a lookup, each once, best score (else best rank) first."""
    if ids_TK.shape[0] == 1:
        return [expert for expert in ids_TK[0].tolist() if expert < num_experts]
    ranked = ids_TK.T.reshape(-1)  # rank 0 of every token, then rank 1, ...
    first_E = np.full(num_experts + 1, ranked.size, np.int64)
    first_E[ranked[::-1]] = np.arange(ranked.size)[::-1]
    chosen = np.flatnonzero(first_E[:num_experts] < ranked.size)
    if scores_TE is None:
        order = np.argsort(first_E[chosen])
    else:
        # Over the tokens that chose the expert: the others' scores do not count.
        token, _ = np.nonzero(ids_TK < num_experts)
        ids = ids_TK[ids_TK < num_experts]
        best_E = np.full(num_experts, -np.inf, np.float32)
        np.maximum.at(best_E, ids, scores_TE[token, ids])
        order = np.argsort(-best_E[chosen], kind="stable")
    return chosen[order].tolist()
