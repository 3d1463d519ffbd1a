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
from moe_edge.kernels.lookup import Ahead
from moe_edge.model.config import ModelConfig
from moe_edge.model.router import Routing
from moe_edge.predict.base import NOT_WANTED
from moe_edge.predict.device_scores import scores_ahead
from moe_edge.predict.stale_gate import LooksAhead


class Coming(NamedTuple):
    """The next layer, whose experts are fetched."""

    gates: tuple  # that name them, of `Prefetch.gates`
    layer: int | jax.Array
    host_ER: jax.Array
    slots_SR: jax.Array  # its own


class Expected(NamedTuple):
    """What a layer's look-up is to begin for the next layer."""

    ahead: Ahead
    coming: Coming


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

    def expected(self, coming: Coming, hidden_TD, taken_TD, k_T) -> Expected | None:
        """What the next layer is expected to choose; None: it has no room for it.

        Args:
          hidden_TD, taken_TD, k_T: of this layer, see `scores_ahead`.
        """
        spec, tokens = self._device.spec, hidden_TD.shape[0]
        # Half of its slots at most: its own misses need the rest.
        room = coming.slots_SR.shape[0] // 2
        most = min(room, spec.num_experts, tokens * spec.top_k)
        if most == 0:
            return None
        given = coming.gates, hidden_TD, taken_TD, k_T
        score_M, ids_M = lax.top_k(scores_ahead(self._config, *given)[0], most)
        is_wanted_M = score_M > NOT_WANTED
        ids_M = jnp.where(is_wanted_M, ids_M.astype(jnp.int32), spec.num_experts)
        first = self._device.first_of(coming.layer)
        return Expected(Ahead(coming.layer, first, ids_M, self._limit), coming)

    def end(
        self, cache: Cache, under_way: UnderWay | None, routing: Routing
    ) -> tuple[Cache, Routing]:
        """WAIT, behind a layer's router and before its look-up.

        Args:
          cache: whose slots are replaced by those that arrived, if any were to.
        """
        if under_way is None:
            return cache, routing
        slots_SR, (ids_TK,) = prefetch.wait(*under_way, [routing.ids_TK])
        cache = cache._replace(slots_SR=slots_SR)
        return cache, routing._replace(ids_TK=ids_TK)


def begin(
    device: DeviceCache, cache: Cache, expected: Expected | None, hidden_TD: jax.Array
) -> tuple[Cache, UnderWay | None, jax.Array]:
    """As `start`, behind a look-up of its own."""
    if expected is None:
        return cache, None, hidden_TD
    cache, plan_2M = look_ahead(device, cache, expected.ahead)
    return cache, *start(expected, plan_2M, hidden_TD)


def start(
    expected: Expected | None, plan_2M: jax.Array | None, hidden_TD: jax.Array
) -> tuple[UnderWay | None, jax.Array]:
    """START, behind the look-up of a layer and before its products.

    Args:
      plan_2M: of `look_up`, None where nothing is expected.
      hidden_TD: what the products take.
    Returns:
      (what is under way; hidden_TD).
    """
    if expected is None or plan_2M is None:
        return None, hidden_TD
    coming = expected.coming
    plan_2M, slots_SR, (hidden_TD,) = prefetch.start(
        plan_2M, coming.slots_SR, coming.host_ER, [hidden_TD]
    )
    return UnderWay(plan_2M, slots_SR), hidden_TD
