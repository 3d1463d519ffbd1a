"""Experts of the next layer on their way while a layer of a decode step computes.

Behind a layer's look-up the routers of the next layer, run on this layer's state, name
what it will choose (`predict.device_scores`). Those that are in no slot get victims'
slots of the next layer and START (`kernels.prefetch`) begins to copy them; WAIT comes
before the next layer's look-up, which so finds them. All of it is in the step's
program: the host reads nothing.

Each layer's slots are an array of its own, so nobody reads or writes those that are
being filled. A wrong prediction costs its bytes, and the slot of what it drove out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.checks import ConfigError
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_lookup import look_ahead
from moe_edge.kernels import prefetch
from moe_edge.model.config import ModelConfig
from moe_edge.model.router import Routing
from moe_edge.predict.base import NOT_WANTED
from moe_edge.predict.device_scores import scores_ahead
from moe_edge.predict.stale_gate import LooksAhead

FETCHED, USED = range(2)  # of `Cache.ahead_2`


class Coming(NamedTuple):
    """The next layer, whose experts are fetched."""

    gates: tuple  # that name them, of `Prefetch.gates`
    layer: int | jax.Array
    host_ER: jax.Array
    slots_SR: jax.Array  # its own


class UnderWay(NamedTuple):
    """What START has begun, until WAIT; nobody else may use it."""

    plan_2M: jax.Array
    slots_SR: jax.Array


class Prefetch:
    """Fetches what a predictor names for the next layer.

    Args:
      device: whose slots and policy they are.
      config: of the model.
      predictor: whose scores the program computes.
      limit: most experts that are fetched ahead for a layer.
    Raises:
      ConfigError: layers share slots, or there is no kernel that copies.
    """

    def __init__(
        self,
        device: DeviceCache,
        config: ModelConfig,
        predictor: LooksAhead,
        limit: int,
    ):
        if -1 in device.spec.layer_S:
            raise ConfigError(
                f"prefetch_in_fused is True and layers share {device.spec.num_slots} "
                "slots; set slot_plan to equal, or raise device_memory"
            )
        prefetch.open_calls()
        self._device, self._config = device, config
        self.predictor, self._limit = predictor, limit

    def gates(self, layer: int) -> tuple:
        """That name the next layer's experts; () where nothing is fetched."""
        if self.predictor.targets(layer)[:1] != (layer + 1,):
            return ()
        return self.predictor.gates_after(layer)[:1]

    def expected(self, coming: Coming, hidden_TD, taken_TD, k_T) -> jax.Array:
        """float32 `[E]`: scores of what the next layer is expected to choose."""
        return scores_ahead(self._config, coming.gates, hidden_TD, taken_TD, k_T)[0]

    def begin(
        self, cache: Cache, coming: Coming, wanted_E: jax.Array, hidden_TD: jax.Array
    ) -> tuple[Cache, UnderWay | None, jax.Array]:
        """START, behind the look-up of a layer and before its products.

        Args:
          wanted_E: of `expected`.
          hidden_TD: what the products take.
        Returns:
          (cache; what is under way, None where the layer has no room; hidden_TD).
        """
        E, tokens = self._device.spec.num_experts, hidden_TD.shape[0]
        # Half of its slots at most: its own misses need the rest.
        room = coming.slots_SR.shape[0] // 2
        most = min(room, E, tokens * self._device.spec.top_k)
        if most == 0:
            return cache, None, hidden_TD
        score_M, ids_M = lax.top_k(wanted_E, most)
        is_wanted_M = score_M > NOT_WANTED
        slot_E = self._device.slots_of(cache, coming.layer)
        is_absent_M = is_wanted_M & (slot_E[ids_M] < 0)
        is_absent_M &= jnp.cumsum(is_absent_M) <= self._limit
        is_here_M = is_wanted_M & (slot_E[ids_M] >= 0)
        ids_M = jnp.where(is_absent_M | is_here_M, ids_M.astype(jnp.int32), E)
        cache, plan_2M = look_ahead(self._device, cache, coming.layer, ids_M)
        cache = self._count(cache, FETCHED, jnp.sum(plan_2M[0] >= 0))
        plan_2M, slots_SR, (hidden_TD,) = prefetch.start(
            plan_2M, coming.slots_SR, coming.host_ER, [hidden_TD]
        )
        return cache, UnderWay(plan_2M, slots_SR), hidden_TD

    def end(
        self, cache: Cache, layer, under_way: UnderWay | None, routing: Routing
    ) -> tuple[Cache, Routing]:
        """WAIT, behind a layer's router and before its look-up.

        Args:
          cache: whose slots are replaced by those that arrived, if any were to.
        """
        if under_way is not None:
            slots_SR, (ids_TK,) = prefetch.wait(*under_way, [routing.ids_TK])
            cache = cache._replace(slots_SR=slots_SR)
            routing = routing._replace(ids_TK=ids_TK)
        unused_E = self._device.unused_LE(cache)[layer]
        experts_E1 = jnp.arange(unused_E.size, dtype=jnp.int32)[:, None]
        is_chosen_E = jnp.any(routing.ids_TK.reshape(1, -1) == experts_E1, axis=1)
        return self._count(cache, USED, jnp.sum(unused_E & is_chosen_E)), routing

    def _count(self, cache: Cache, place: int, more: jax.Array) -> Cache:
        more_2 = jnp.where(jnp.arange(2) == place, more, 0).astype(jnp.int32)
        return cache._replace(ahead_2=cache.ahead_2 + more_2)
