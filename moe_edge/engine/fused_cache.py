"""The slot cache inside a compiled program: table, policy and slots are arrays.

One look-up brings the experts that a set of tokens chose into the slots: hits are
refreshed, then each miss takes the policy's victim and one record moves from the
host to the device. The loop's length is the number of misses, so a step that hits
moves nothing, and the slots are a loop carry, so they are written in place.

The same semantics as `offload/slot_cache.py`, which the tests replay, as long as what
a layer chose fits its slots: a layer in waves is one look-up a wave here, so policies
that count steps or scores see it more than once.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_edge.core.checks import CapacityError, ConfigError, check_shape
from moe_edge.core.plug_in import is_ours
from moe_edge.kernels.lookup_programs import HITS, USED
from moe_edge.offload.evict_base import CacheSpec, Eviction, State, pick, put


class Cache(NamedTuple):
    """What a step receives, changes and hands to the next one (all donated)."""

    # Records, as stored on the host. Where each layer has an array of its own slots
    # (`DeviceCache.is_cut`): that of the layer at hand, or all, None for dense layers.
    slots_SR: jax.Array | tuple[jax.Array | None, ...]
    slot_N: jax.Array  # int32 [L * E + 1]: slot of a block key, -1; the last is unused
    policy: State
    step: jax.Array  # int32, rises by one a step
    counts_L3: jax.Array  # int32, distinct experts: hits, misses, evictions
    # int32: pairs that a route saw while decoding, and changed.
    choices_2: jax.Array
    # int32: slots that a policy of another author gave up and may not; None: of ours.
    wrong: jax.Array | None = None
    # int32: tokens for which a route of another author chose what cannot be computed.
    refused: jax.Array | None = None
    # int32: records fetched ahead of need, and those used since; None: none are.
    ahead_2: jax.Array | None = None
    # int32: how many of M absent experts of a layer the host computes, and how many it
    # has computed in all; None: it computes none.
    of_absent_M: jax.Array | None = None
    helped: jax.Array | None = None

    def at(self, where: int | slice) -> "Cache":
        """With the slots of one layer, or of some, where each has an array."""
        if not isinstance(self.slots_SR, tuple):
            return self
        return self._replace(slots_SR=self.slots_SR[where])

    def after(self, where: int | slice, part: "Cache") -> "Cache":
        """What became of `at(where)`, with the slots of the other layers."""
        if not isinstance(self.slots_SR, tuple):
            return part
        slots = list(self.slots_SR)
        slots[where] = part.slots_SR
        return part._replace(slots_SR=tuple(slots))


@dataclasses.dataclass(frozen=True)
class DeviceCache:
    """The pure functions of a cache of one shape and policy.

    Attributes:
      is_cut: each layer's slots are an array: one array that a call reads while another
        writes it in place would be copied whole.
    Raises:
      ConfigError: a policy for the host.
      CapacityError: one of these layers has no slot.
    """

    spec: CacheSpec
    policy: Eviction
    moe_layers: tuple[int, ...]
    is_cut: bool = False

    def __post_init__(self):
        if self.policy.host_only:
            raise ConfigError(
                f"eviction policy {self.policy.name!r} runs on the host only; the "
                "fused mode needs one that runs inside jit: use mode layered"
            )
        for layer in self.moe_layers:
            if self.capacity_L[layer] < 1:
                raise CapacityError(
                    f"layer {layer} has 0 of {self.spec.num_slots} expert slots; every "
                    "MoE layer needs at least 1: raise --device_memory"
                )

    @functools.cached_property
    def capacity_L(self) -> tuple[int, ...]:
        """How many experts of each layer can be in slots at once."""
        owners, L = self.spec.layer_S, self.spec.num_layers
        return tuple(owners.count(-1) + owners.count(layer) for layer in range(L))

    @functools.cached_property
    def least_capacity(self) -> int:
        """The smallest `capacity_L` of a MoE layer."""
        return min(self.capacity_L[layer] for layer in self.moe_layers)

    def first_of(self, layer):
        """The slot, by number, at which a layer's array begins."""
        if not self.is_cut:
            return np.int32(0)
        firsts = np.searchsorted(self.spec.layer_S, np.arange(self.spec.num_layers))
        firsts_L = firsts.astype(np.int32)
        if not isinstance(layer, int):
            firsts_L = jnp.asarray(firsts_L)
        return firsts_L[layer]

    def place_of(self, layer, slot):
        """Where slots of a layer, by number, are in its array; elsewhere others are."""
        return slot - self.first_of(layer) if self.is_cut else slot

    def new_slots(self, width: int, dtype) -> jax.Array | tuple[jax.Array | None, ...]:
        """Room for records, zeros."""
        if not self.is_cut:
            return jnp.zeros((self.spec.num_slots, width), dtype)
        rooms = enumerate(self.capacity_L)
        return tuple(
            jnp.zeros((room, width), dtype) if layer in self.moe_layers else None
            for layer, room in rooms
        )

    def empty(self, slots_SR: jax.Array | tuple[jax.Array | None, ...]) -> Cache:
        """An empty cache over these slots; what they hold is never read."""
        spec = self.spec
        blocks = spec.num_layers * spec.num_experts
        return Cache(
            slots_SR,
            jnp.full(blocks + 1, -1, jnp.int32),
            self.policy.init(spec, xp=jnp),
            jnp.int32(0),
            jnp.zeros((spec.num_layers, 3), jnp.int32),
            jnp.zeros(2, jnp.int32),
            None if is_ours(self.policy) else jnp.int32(0),
            ahead_2=jnp.zeros(2, jnp.int32) if self.is_cut else None,
        )

    def slots_of(self, cache: Cache, layer) -> jax.Array:
        """Slot of each expert of a layer, int32 `[E]`, -1 where it is absent."""
        E = self.spec.num_experts
        return lax.dynamic_slice(cache.slot_N, (layer * E,), (E,))

    def unused_LE(self, cache: Cache) -> jax.Array:
        """bool: who was fetched ahead of need and has not been used since.

        Who entered in the look-up of the layer before its own and was not touched since
        has its time (`evict_base.base_state`).
        """
        L, E = self.spec.num_layers, self.spec.num_experts
        last_LE = cache.policy["last_B"][:-1].reshape(L, E)
        before_L1 = jnp.arange(L, dtype=jnp.int32)[:, None] - 1
        is_ahead_LE = (last_LE % 2 == 1) & (last_LE // 2 % L == before_L1)
        return is_ahead_LE & (cache.slot_N[:-1].reshape(L, E) >= 0)

    def touch(self, cache: Cache, layer, ids_TK, scores_TE) -> Cache:
        """The cache once its policy has seen a look-up."""
        if cache.ahead_2 is not None:
            cache = cache._replace(ahead_2=self._used(cache, layer, ids_TK))
        state = self.policy.touch(cache.policy, layer, ids_TK, scores_TE, cache.step)
        slot_N = cache.slot_N
        if self.policy.forgets:
            slot_N = _read_back(slot_N, state["key_S"])
        return cache._replace(policy=state, slot_N=slot_N)

    def _used(self, cache: Cache, layer, ids_TK) -> jax.Array:
        """`ahead_2` with those of a look-up that were fetched ahead of it."""
        unused_E = self.unused_LE(cache)[layer]
        experts_E1 = jnp.arange(unused_E.size, dtype=jnp.int32)[:, None]
        is_chosen_E = jnp.any(ids_TK.reshape(1, -1) == experts_E1, axis=1)
        used = jnp.sum(unused_E & is_chosen_E, dtype=jnp.int32)
        return cache.ahead_2 + jnp.where(jnp.arange(2) == USED, used, 0)

    def acquire(
        self, cache: Cache, layer, ids_TK, scores_TE, host_ER, elsewhere_E=None
    ) -> tuple[Cache, jax.Array]:
        """Brings the chosen experts into slots; they must fit in together.

        Args:
          layer: int or int32 scalar.
          ids_TK: int32, E where nothing is wanted.
          scores_TE: float32, for policies that use them.
          host_ER: the layer's records in host memory.
          elsewhere_E: bool, absent experts that the policy sees and nobody fetches.
        Returns:
          (cache, bool `[E]`: the experts that were fetched).
        """
        E = self.spec.num_experts
        check_shape("host_ER", host_ER, (E, cache.slots_SR.shape[1]))
        experts_1E = jnp.arange(E, dtype=jnp.int32)[None, None]
        chosen_TE = jnp.any(ids_TK[:, :, None] == experts_1E, axis=1)
        wanted_E = jnp.any(chosen_TE, axis=0)
        if elsewhere_E is not None:
            wanted_E &= ~elsewhere_E
        # Misses load in the order of a token's choice, or of several tokens' scores.
        if ids_TK.shape[0] == 1:
            rank_E = jnp.argmax(ids_TK[0][:, None] == experts_1E[0], axis=0)
            urgency_E = -rank_E.astype(jnp.float32)
        else:
            urgency_E = jnp.max(jnp.where(chosen_TE, scores_TE, -jnp.inf), axis=0)
        cache = self.touch(cache, layer, ids_TK, scores_TE)
        missing_E = wanted_E & (self.slots_of(cache, layer) < 0)

        owner_S = jnp.asarray(self.spec.layer_S, jnp.int32)
        foreign_S = (owner_S >= 0) & (owner_S != layer)

        def fetch(_, carry):
            slots_SR, slot_N, state, missing_E, evictions, wrong = carry
            expert = jnp.argmax(jnp.where(missing_E, urgency_E, -jnp.inf))
            expert = expert.astype(jnp.int32)
            held_S = state["key_S"] - layer * E
            mine_S = (held_S >= 0) & (held_S < E)
            kept_S = mine_S & wanted_E[jnp.clip(held_S, 0, E - 1)]
            protected_S = kept_S | foreign_S
            slot, state = self.policy.victim(state, protected_S)
            slot = jnp.asarray(slot, jnp.int32)
            if wrong is not None:  # another author's: tokens must be right all the same
                bad = (slot < 0) | (slot >= self.spec.num_slots) | protected_S[slot]
                slot = jnp.where(bad, pick(state, None, protected_S), slot)
                slot, wrong = slot.astype(jnp.int32), wrong + bad.astype(jnp.int32)
            old, key = state["key_S"][slot], layer * E + expert
            gone = jnp.where(old < 0, slot_N.shape[0] - 1, old)
            slot_N = _set(_set(slot_N, gone, -1), key, slot)
            state = put(state, slot, key)
            # In this order (slice, then device) XLA keeps the slice a transfer; any
            # arithmetic in between would move to the host.
            record_1R = lax.dynamic_slice(
                host_ER,
                (expert, jnp.int32(0)),
                (1, host_ER.shape[1]),
                allow_negative_indices=False,  # would take a kernel each
            )
            record_1R = jax.device_put(record_1R, jax.memory.Space.Device)
            slots_SR = lax.dynamic_update_slice(
                slots_SR,
                record_1R,
                (self.place_of(layer, slot), jnp.int32(0)),
                allow_negative_indices=False,
            )
            evictions = evictions + (old >= 0).astype(jnp.int32)
            missing_E = _set(missing_E, expert, False)
            return slots_SR, slot_N, state, missing_E, evictions, wrong

        misses = jnp.sum(missing_E, dtype=jnp.int32)
        given = cache.slots_SR, cache.slot_N, cache.policy, missing_E, jnp.int32(0)
        carry = lax.fori_loop(0, misses, fetch, (*given, cache.wrong))
        slots_SR, slot_N, state, _, evictions, wrong = carry
        hits = jnp.sum(wanted_E, dtype=jnp.int32) - misses
        cache = cache._replace(
            slots_SR=slots_SR, slot_N=slot_N, policy=state, wrong=wrong
        )
        counts_3 = jnp.stack([hits, misses, evictions])
        return self.count(cache, layer, counts_3), missing_E

    def count(self, cache: Cache, layer, counts_3) -> Cache:
        """With a layer's hits, misses and evictions added to what is counted."""
        at = (jnp.asarray(layer, jnp.int32), jnp.int32(0))
        counts_13 = lax.dynamic_slice(cache.counts_L3, at, (1, 3)) + counts_3[None]
        counts_L3 = lax.dynamic_update_slice(cache.counts_L3, counts_13, at)
        return cache._replace(counts_L3=counts_L3)

    def settle_hits(self, before: Cache, cache: Cache, layer, hit_E) -> Cache:
        """Counts of a layer's waves: hits are the experts that none of them fetched."""
        at = (jnp.asarray(layer, jnp.int32), jnp.int32(HITS))
        hits_11 = lax.dynamic_slice(before.counts_L3, at, (1, 1))
        hits_11 = hits_11 + jnp.sum(hit_E, dtype=jnp.int32)
        counts_L3 = lax.dynamic_update_slice(cache.counts_L3, hits_11, at)
        return cache._replace(counts_L3=counts_L3)


def _set(array_N, index, value) -> jax.Array:
    """One element changed, as an update of a slice: a scatter would be a loop."""
    value = jnp.asarray(value, array_N.dtype)
    return lax.dynamic_update_index_in_dim(
        array_N, value, index, 0, allow_negative_indices=False
    )


def _read_back(slot_N, key_S) -> jax.Array:
    """The table again, after a policy that empties slots itself."""
    slots_S = jnp.arange(key_S.shape[0], dtype=jnp.int32)
    places_S = jnp.where(key_S < 0, slot_N.shape[0] - 1, key_S)
    return jnp.full_like(slot_N, -1).at[places_S].set(slots_S)
