"""Experts of the next layer on their way while a layer of a decode step computes.

Before a layer's look-up the router of the next layer names what it will choose
(`predict.device_scores`): on this layer's state, or behind its own attention on a
partial state, what the residual stream is without the experts that are absent. Those
that are in no slot get victims' slots of the next layer and START (`kernels.prefetch`)
begins to copy them; WAIT comes before the next layer's look-up, which so finds them.
All of it is in the step's program: the host reads nothing.

A look at a partial state costs the products of the experts that are here, and the next
layer's attention, a second time. The keys and values that it writes are those of the
step's own positions, which the layer itself then writes, so no cache is copied.

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
from moe_edge.model.kv_cache import Cache as KvCache
from moe_edge.model.router import Routing
from moe_edge.model.transformer import Block, Chunk
from moe_edge.predict.base import NOT_WANTED
from moe_edge.predict.device_scores import partial_gate, scores_ahead
from moe_edge.predict.stale_gate import DevicePredictor, LooksAhead


class Then(NamedTuple):
    """What a look at the next layer takes."""

    block: Block
    chunk: Chunk
    window: jax.Array
    kv: KvCache


class Coming(NamedTuple):
    """The next layer, whose experts are fetched."""

    gates: tuple  # that name them, of `Prefetch.gates`
    layer: int | jax.Array
    host_ER: jax.Array
    slots_SR: jax.Array  # its own
    then: Then | None  # where a partial state names them


class Expected(NamedTuple):
    """What a layer's look-up is to begin for the next layer."""

    ahead: Ahead
    coming: Coming
    kv: KvCache | None  # of the next layer, where a look has written it


class UnderWay(NamedTuple):
    """What START has begun, until WAIT; nobody else may use it."""

    plan_2M: jax.Array
    slots_SR: jax.Array
    kv: KvCache | None  # see `Expected`


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
        predictor: DevicePredictor,
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
        self.peeks = "partial_state" in predictor.needs

    def gates(self, layer: int) -> tuple:
        """That name the next layer's experts; () where none do."""
        if not isinstance(self.predictor, LooksAhead):
            return ()
        if self.predictor.targets(layer)[:1] != (layer + 1,):
            return ()
        return self.predictor.gates_after(layer)[:1]

    def most(self, slots_SR: jax.Array, tokens: int) -> int:
        """How many of a layer's slots may be filled ahead of a step of so many rows:
        half of them, for its own misses need the rest."""
        spec = self._device.spec
        return min(slots_SR.shape[0] // 2, spec.num_experts, tokens * spec.top_k)

    def expected(self, coming: Coming, hidden_TD, taken_TD, k_T) -> Expected:
        """What the next layer is expected to choose by this layer's state.

        Args:
          hidden_TD, taken_TD, k_T: of this layer, see `scores_ahead`.
        """
        given = self._config, coming.gates, hidden_TD, taken_TD, k_T
        return self._best(coming, scores_ahead(*given)[0], len(hidden_TD))

    def peeked(
        self, coming: Coming, then: Then, partial_BSD: jax.Array, travels: jax.Array
    ) -> Expected:
        """What the next layer would choose on a partial state.

        Args:
          then: of `coming`.
          partial_BSD: the residual stream without what absent experts would add.
          travels: bool, whether any are absent: else nothing is fetched, as in mode
            layered, for the next router itself sees this state as soon.
        """
        block, chunk, window, kv = then
        given = block, partial_BSD, chunk, window, kv, self.predictor.top_a
        wanted_E, kv = partial_gate(*given)
        wanted_E = jnp.where(travels, wanted_E, NOT_WANTED)
        kept = None if block.has_state else kv
        return self._best(coming, wanted_E, len(partial_BSD), kept)

    def _best(
        self, coming: Coming, wanted_E, tokens: int, kv: KvCache | None = None
    ) -> Expected:
        score_M, ids_M = lax.top_k(wanted_E, self.most(coming.slots_SR, tokens))
        ids_M = ids_M.astype(jnp.int32)
        ids_M = jnp.where(score_M > NOT_WANTED, ids_M, self._device.spec.num_experts)
        first = self._device.first_of(coming.layer)
        return Expected(Ahead(coming.layer, first, ids_M, self._limit), coming, kv)

    def end(
        self, cache: Cache, under_way: UnderWay | None, routing: Routing
    ) -> tuple[Cache, Routing]:
        """WAIT, behind a layer's router and before its look-up.

        Args:
          cache: whose slots are replaced by those that arrived, if any were to.
        """
        if under_way is None:
            return cache, routing
        given = under_way.plan_2M, under_way.slots_SR, [routing.ids_TK]
        slots_SR, (ids_TK,) = prefetch.wait(*given)
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


def behind(expected: Expected, ids_TK: jax.Array) -> jax.Array:
    """The ids, which are not to be had before the prediction.

    XLA forgets barriers before it looks for what may be written in place. That no
    predicted id is below 0 it cannot know.
    """
    return jnp.where(expected.ahead.ids_M[0] >= 0, ids_TK, -1)


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
    return UnderWay(plan_2M, slots_SR, expected.kv), hidden_TD
