"""A prompt's experts on their way while others are computed.

A layer of a prompt chooses most experts, more than its slots hold, so it is computed in
waves (`fused_waves`), and a wave whose experts are fetched before they are computed
leaves the link idle for one time and the products for the other. Here all look-ups of a
layer come first: they are the loop's, so tables, clocks and counters become the same.
What they found is then moved and computed in turns:

    START of what turn t + 1 computes and lacks, products of turn t, WAIT, ..

The slots have PARTS parts. A part's experts of one wave are a turn, those of the next
wave PARTS turns later. So START, which stands behind the products of turn t - 1, fills
slots whose experts were computed, and none that turn t reads. What the first wave finds
in slots is computed a turn sooner than what it lacks, which arrives meanwhile.

How many waves there are at most is known from shapes, so nothing is a loop, and nobody
reads a flag on the host. A wave that nothing is left for changes nothing, and a turn
without experts has empty products.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_lookup import admit, look_ahead
from moe_edge.engine.fused_prefetch import Expected, UnderWay, start
from moe_edge.engine.fused_waves import chosen, next_experts
from moe_edge.kernels import prefetch
from moe_edge.model import expert_groups
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.router import Routing

PARTS = 2  # of a layer's slots, at least 2


class Wave(NamedTuple):
    """A wave's experts, `[E]` each."""

    turn_E: jax.Array  # int32: when each is computed; -1: not in this wave
    slot_E: jax.Array  # int32, by number: where each is then
    is_absent_E: jax.Array  # bool: who is to be moved there


class Turns:
    """Runs layers of more rows than the form `pairs` takes.

    Args:
      device: whose slots and policy they are; the policy has no `own_choice`.
    Raises:
      ConfigError: there is no kernel that copies.
    """

    def __init__(self, device: DeviceCache):
        prefetch.open_calls()
        self._device = device

    def suit(self, waves: ExpertWaves) -> bool:
        """Whether so many rows run here: sums of few are made wave by wave."""
        return waves.method == "blocks"

    def run(
        self,
        waves: ExpertWaves,
        cache: Cache,
        layer,
        hidden_TD: jax.Array,
        routing: Routing,
        host_ER: jax.Array,
        expected: Expected | None = None,
    ) -> tuple[Cache, jax.Array, UnderWay | None]:
        """As `fused_waves.run_through_slots`, with the same bits and the same cache."""
        ids_TK, weights_TK, scores_TE = routing
        device, under_way, plan_2M = self._device, None, None
        is_one = min(ids_TK.size, device.spec.num_experts) <= device.least_capacity
        if expected is not None and not is_one:  # as the loop has it
            cache, plan_2M = look_ahead(device, cache, expected.ahead)
        cache, found = self.look_up(cache, layer, ids_TK, scores_TE)
        if expected is not None and is_one:
            cache, plan_2M = look_ahead(device, cache, expected.ahead)
        slots_SR, plan_2E = cache.slots_SR, None
        total, last = waves.start(hidden_TD, ids_TK), PARTS * len(found)
        if expert_groups.suits(slots_SR, waves.layout):
            total = total[: ids_TK.size]  # nothing spills, and nothing is copied
        for turn in range(last + 1):
            if plan_2E is not None:
                slots_SR, (total,) = prefetch.wait(plan_2E, slots_SR, [total])
            if turn < last:
                plan_2E = self._plan(layer, found, turn + 1)
                plan_2E, slots_SR, _ = prefetch.start(plan_2E, slots_SR, host_ER)
            else:  # nothing of this layer is on the link any more
                under_way, total = start(expected, plan_2M, total)
            slot_E = self._slots(found, turn)[0]
            given = hidden_TD, ids_TK, weights_TK, slots_SR
            total = waves.run(total, *given, device.place_of(layer, slot_E))
        cache = cache._replace(slots_SR=slots_SR)
        return cache, waves.finish(total, ids_TK, weights_TK), under_way

    def look_up(
        self, cache: Cache, layer, ids_TK, scores_TE
    ) -> tuple[Cache, list[Wave]]:
        """All waves of a layer, whose records are still to be moved.

        Returns:
          (cache, as the loop leaves it but for its slots; the waves).
        """
        device, E = self._device, self._device.spec.num_experts
        most, found = min(ids_TK.size, E), []
        # Each layer's slots are an array, or at least so many.
        least = cache.slots_SR.shape[0] if device.is_cut else device.least_capacity
        capacity = jnp.asarray(device.capacity_L, jnp.int32)[layer]
        order_E = _order(ids_TK, scores_TE)
        rank_E = jnp.argsort(order_E)
        counts_3, rest_TK, hit_S = jnp.zeros(3, jnp.int32), ids_TK, None
        for number in range(-(-most // least)):
            resident_E = device.slots_of(cache, layer) >= 0
            now_TK = next_experts(rest_TK, resident_E, capacity)
            wave_TK = jnp.where(now_TK, ids_TK, E)
            rest_TK = jnp.where(now_TK, E, rest_TK)
            now_E, before = chosen(wave_TK, E), cache
            cache = device.touch(cache, layer, wave_TK, scores_TE)
            sorted_1E = jnp.where(now_E[order_E], order_E, E)[None]
            cache, slot_E, host_E, more_3 = admit(device, cache, layer, sorted_1E, None)
            if most > device.least_capacity:  # there the loop has no round
                cache = _where(jnp.any(now_E), cache, before)
            counts_3 += more_3
            slot_E, is_absent_E = slot_E[rank_E], host_E[rank_E] >= 0
            if hit_S is None:
                slots_S = jnp.arange(device.spec.num_slots, dtype=jnp.int32)
                is_hit_E = now_E & ~is_absent_E
                is_there_SE = slot_E[None] == slots_S[:, None]
                hit_S = jnp.any(is_there_SE & is_hit_E[None], axis=1)
            later_E = jnp.where(hit_S[slot_E], 0, 1)
            turn_E = slot_E % PARTS + later_E + PARTS * number
            found.append(Wave(jnp.where(now_E, turn_E, -1), slot_E, is_absent_E))
        return device.count(cache, layer, counts_3), found

    def _slots(self, found: list[Wave], turn: int) -> tuple[jax.Array, jax.Array]:
        """Of what a turn computes: int32 `[E]`, the slots, S where there is none, and
        bool `[E]`, who is to be moved there."""
        spec = self._device.spec
        slot_E = jnp.full(spec.num_experts, spec.num_slots, jnp.int32)
        comes_E = jnp.zeros(spec.num_experts, bool)
        for number, wave in enumerate(found):
            if 0 <= turn - PARTS * number <= PARTS:
                is_now_E = wave.turn_E == turn
                slot_E = jnp.where(is_now_E, wave.slot_E, slot_E)
                comes_E |= is_now_E & wave.is_absent_E
        return slot_E, comes_E

    def _plan(self, layer, found: list[Wave], turn: int) -> jax.Array:
        """int32 `[2, E]`, of `kernels.prefetch`, for a turn."""
        slot_E, comes_E = self._slots(found, turn)
        experts_E = jnp.arange(comes_E.size, dtype=jnp.int32)
        host_E = jnp.where(comes_E, experts_E, prefetch.NONE)
        return jnp.stack([host_E, self._device.place_of(layer, slot_E)])


def _order(ids_TK, scores_TE) -> jax.Array:
    """Experts in the order in which the loop fetches them: by several tokens' scores,
    int32 `[E]`; those that nobody chose come last."""
    experts_11E = jnp.arange(scores_TE.shape[1], dtype=jnp.int32)[None, None]
    is_chosen_TE = jnp.any(ids_TK[:, :, None] == experts_11E, axis=1)
    score_TE = jnp.where(scores_TE == scores_TE, scores_TE, jnp.inf)  # NaN, an order
    urgency_E = jnp.max(jnp.where(is_chosen_TE, score_TE, -jnp.inf), axis=0)
    return jnp.argsort(-urgency_E, stable=True).astype(jnp.int32)


def _where(condition, after: Cache, before: Cache) -> Cache:
    """What a look-up changes, or what was before it."""
    changed = after.policy, after.slot_N
    policy, slot_N = jax.tree.map(
        lambda new, old: jnp.where(condition, new, old),
        changed,
        (before.policy, before.slot_N),
    )
    return after._replace(policy=policy, slot_N=slot_N)
