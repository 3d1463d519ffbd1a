"""A prompt's experts on their way while others are computed.

A layer of a prompt chooses most experts, more than its slots hold, so it is computed in
waves (`fused_waves`), and a wave whose experts are fetched before they are computed
leaves the link idle for one time and the products for the other. Here waves are looked
up as the loop does it, so tables, clocks and counters become the same, but before their
records are there. What was found is moved and computed in turns:

    START of what turn t + 1 computes and lacks, products of turn t, WAIT, ..

The slots have PARTS parts. A part's experts of one wave are a turn, those of the next
wave PARTS turns later. So START, which stands behind the products of turn t - 1, fills
slots whose experts were computed, and none that turn t reads. What the first wave finds
in slots is computed a turn sooner than what it lacks, which arrives meanwhile.

A wave is looked up between the START and the WAIT before its own first START, so what
the look-up takes hides behind the link. Data hold it there: its tokens' choice comes
out of that START, and what it found goes through that WAIT.

How many waves there are at most is known from shapes, so nothing is a loop, and nobody
reads a flag on the host. A wave that nothing is left for changes nothing, and a turn
without experts has empty products. Unrolled waves take time to compile, so there are
MOST_WAVES of them, and only in prompts, whose layers share a program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_lookup import admit
from moe_edge.engine.fused_waves import chosen, next_experts
from moe_edge.kernels import prefetch
from moe_edge.model import expert_groups
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.router import Routing

PARTS = 2  # of a layer's slots, at least 2
MOST_WAVES = 16  # more are the loop's; 16 compile in 11 s, the loop in 3


class Wave(NamedTuple):
    """A wave's experts, `[E]` each."""

    turn_E: jax.Array  # int32: when each is computed; -1: not in this wave
    slot_E: jax.Array  # int32, by number: where each is then
    is_absent_E: jax.Array  # bool: who is to be moved there


class Turns:
    """Runs layers of prompts of more rows than the form `pairs` takes.

    Args:
      device: whose slots and policy they are; the policy has no `own_choice`.
    Raises:
      ConfigError: there is no kernel that copies.
    """

    def __init__(self, device: DeviceCache):
        prefetch.open_calls()
        self._device = device

    def suits(self, waves: ExpertWaves, cache: Cache, ids_TK: jax.Array) -> bool:
        """Whether a prompt's layer runs here: pairs of few rows are summed in order."""
        is_short = self._most_waves(cache, ids_TK) <= MOST_WAVES
        return waves.method == "blocks" and is_short

    @property
    def is_somewhere(self) -> bool:
        """Whether long prompts of some layer run here."""
        return len(self._in_loops()) < len(self._device.moe_layers)

    def remarks(self) -> list[str]:
        """What people should know."""
        device, E = self._device, self._device.spec.num_experts
        if not (loops := self._in_loops()):
            return []
        return [
            f"overlap_in_fused is off for long prompts in {len(loops)} of "
            f"{len(device.moe_layers)} layers with experts, which fetch by a loop: one "
            f"has {device.least_capacity} slots for {E} experts, and it would take "
            f"{-(-E // MOST_WAVES)}"
        ]

    def _in_loops(self) -> list[int]:
        """Layers that take too many waves where a prompt chooses all experts."""
        device = self._device
        slots_L = [device.least_capacity] * device.spec.num_layers
        slots_L = device.capacity_L if device.is_cut else slots_L
        most = MOST_WAVES * np.array(slots_L)
        return [at for at in device.moe_layers if device.spec.num_experts > most[at]]

    def run(
        self,
        waves: ExpertWaves,
        cache: Cache,
        layer,
        hidden_TD: jax.Array,
        routing: Routing,
        host_ER: jax.Array,
    ) -> tuple[Cache, jax.Array]:
        """As `fused_waves.run_through_slots`, with the same bits and the same cache."""
        ids_TK, weights_TK, scores_TE = routing
        device, slots_SR = self._device, cache.slots_SR
        most = self._most_waves(cache, ids_TK)
        found, last = LookUps(device, cache, layer, ids_TK, scores_TE), PARTS * most
        total = waves.start(hidden_TD, ids_TK)
        if expert_groups.suits(slots_SR, waves.layout):
            total = total[: ids_TK.size]  # nothing spills, and nothing is copied

        def compute(turn, total, slots_SR):
            place_E = device.place_of(layer, found.of_turn(turn)[0])
            given = hidden_TD, ids_TK, weights_TK, slots_SR, place_E
            return waves.run(total, *given)

        for _ in range(min(most, 1 // PARTS + 1)):
            found.look_up()
        plan_2E = found.plan(1)
        for turn in range(last):
            comes = turn + 2  # whose START is the next one
            is_new = len(found.waves) <= min(comes // PARTS, most - 1)
            given = plan_2E, slots_SR, host_ER, [found.rest_TK] if is_new else []
            plan_2E, slots_SR, rest = prefetch.start(*given)
            if is_new:
                (found.rest_TK,) = rest
                found.look_up()
            after = [found.plan(comes)] if comes <= last else []
            total = compute(turn, total, slots_SR)
            given = plan_2E, slots_SR, [total, *after]
            slots_SR, (total, *after) = prefetch.wait(*given)
            plan_2E = after[0] if after else None
        total = compute(last, total, slots_SR)
        cache = found.counted()._replace(slots_SR=slots_SR)
        return cache, waves.finish(total, ids_TK, weights_TK)

    def _most_waves(self, cache: Cache, ids_TK: jax.Array) -> int:
        device = self._device
        # Each layer's slots are an array, or at least so many.
        least = cache.slots_SR.shape[0] if device.is_cut else device.least_capacity
        return -(-min(ids_TK.size, device.spec.num_experts) // least)


class LookUps:
    """A layer's waves, looked up one after another while a program is traced.

    Attributes:
      waves: looked up so far, whose records are still to be moved.
      rest_TK: int32, the choice of what no wave took yet; E elsewhere.
    """

    def __init__(
        self, device: DeviceCache, cache: Cache, layer, ids_TK, scores_TE: jax.Array
    ):
        self._device, self._cache, self._layer = device, cache, layer
        self._ids_TK, self._scores_TE = ids_TK, scores_TE
        self._order_E = _order(ids_TK, scores_TE)
        self._rank_E = jnp.argsort(self._order_E)
        self._counts_3, self._hit_S = jnp.zeros(3, jnp.int32), None
        self.waves: list[Wave] = []
        self.rest_TK = ids_TK

    def look_up(self) -> None:
        """The next wave."""
        device, layer, before = self._device, self._layer, self._cache
        E, S, number = device.spec.num_experts, device.spec.num_slots, len(self.waves)
        capacity = jnp.asarray(device.capacity_L, jnp.int32)[layer]
        resident_E = device.slots_of(before, layer) >= 0
        now_TK = next_experts(self.rest_TK, resident_E, capacity)
        wave_TK = jnp.where(now_TK, self.rest_TK, E)
        self.rest_TK = jnp.where(now_TK, E, self.rest_TK)
        now_E = chosen(wave_TK, E)
        cache = device.touch(before, layer, wave_TK, self._scores_TE)
        sorted_1E = jnp.where(now_E[self._order_E], self._order_E, E)[None]
        cache, slot_E, host_E, more_3 = admit(device, cache, layer, sorted_1E, None)
        if min(self._ids_TK.size, E) > device.least_capacity:  # else it has one round
            cache = _where(jnp.any(now_E), cache, before)
        self._cache, self._counts_3 = cache, self._counts_3 + more_3
        slot_E, is_absent_E = slot_E[self._rank_E], host_E[self._rank_E] >= 0
        if self._hit_S is None:
            is_there_SE = slot_E[None] == jnp.arange(S, dtype=jnp.int32)[:, None]
            self._hit_S = jnp.any(is_there_SE & (now_E & ~is_absent_E)[None], axis=1)
        later_E = jnp.where(self._hit_S[slot_E], 0, 1)
        turn_E = slot_E % PARTS + later_E + PARTS * number
        self.waves.append(Wave(jnp.where(now_E, turn_E, -1), slot_E, is_absent_E))

    def of_turn(self, turn: int) -> tuple[jax.Array, jax.Array]:
        """Of what a turn computes: int32 `[E]`, the slots, S where there is none, and
        bool `[E]`, who is to be moved there."""
        spec = self._device.spec
        slot_E = jnp.full(spec.num_experts, spec.num_slots, jnp.int32)
        comes_E = jnp.zeros(spec.num_experts, bool)
        for number, wave in enumerate(self.waves):
            if 0 <= turn - PARTS * number <= PARTS:
                is_now_E = wave.turn_E == turn
                slot_E = jnp.where(is_now_E, wave.slot_E, slot_E)
                comes_E |= is_now_E & wave.is_absent_E
        return slot_E, comes_E

    def plan(self, turn: int) -> jax.Array:
        """int32 `[2, E]`, of `kernels.prefetch`, for a turn."""
        slot_E, comes_E = self.of_turn(turn)
        experts_E = jnp.arange(comes_E.size, dtype=jnp.int32)
        host_E = jnp.where(comes_E, experts_E, prefetch.NONE)
        return jnp.stack([host_E, self._device.place_of(self._layer, slot_E)])

    def counted(self) -> Cache:
        """As the loop leaves it, but for its slots."""
        return self._device.count(self._cache, self._layer, self._counts_3)


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
