"""A layer of a decode step whose absent experts are computed while they arrive.

Where a loop would copy each absent record into its slot and the products would read it
there again, one kernel takes all chosen experts (`kernels/few.py`): those in slots from
there, the others from the host's pinned memory, writing each into its victim's slot as
it goes. So the step has no loop, no flag that the host reads, and no copy.
"""

import functools

import jax
import jax.numpy as jnp

from moe_edge.core.checks import ConfigError
from moe_edge.engine.fused_assist import FusedAssist, Helped
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_lookup import look_up
from moe_edge.engine.fused_prefetch import Expected, UnderWay, start
from moe_edge.kernels import few
from moe_edge.kernels.rows import are_possible
from moe_edge.model.config import ModelConfig
from moe_edge.model.expert_groups import add_ranks
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from moe_edge.model.router import Routing
from moe_edge.offload.evict_base import own_choice

MOST_ROWS = 16  # of a step, as of the form `pairs`


def check_zero_copy() -> None:
    """Raises ConfigError where kernels cannot read records in place."""
    if not are_possible():
        raise ConfigError(
            "zero_copy is True, and only a GPU's kernels read the host's memory (here "
            f"is {jax.default_backend()}, or MOE_EDGE_KERNELS says xla); leave it out"
        )
    if not few.is_asked():
        raise ConfigError(
            "zero_copy is True and MOE_EDGE_FEW_ROWS is 0, so other steps would round "
            "rows that its kernel does not; leave one of them out"
        )


class ZeroCopy:
    """Runs a layer's experts without a loop, where that can be done.

    Args:
      device: whose slots and policy they are.
      config: the model.
      assist: has the host compute absent experts; None: it computes none.
    Raises:
      ConfigError: see `check_zero_copy`.
    """

    def __init__(
        self,
        device: DeviceCache,
        config: ModelConfig,
        assist: FusedAssist | None = None,
    ):
        check_zero_copy()
        self._device, self._assist, moe = device, assist, config.moe
        self._layout = RecordLayout.of(config)
        limits = {"kind": moe.activation, "limit": moe.swiglu_limit}
        self._act = functools.partial(activate, **limits)

    @property
    def hindrance(self) -> str | None:
        """Why all steps run by the loop; None: those do that `suits` refuses."""
        spec, policy = self._device.spec, self._device.policy
        if (method := own_choice(policy)) is not None:
            return (
                f"eviction policy {policy.name} has a {method} of its own, which is "
                "asked expert by expert"
            )
        least = self._device.least_capacity
        if min(spec.top_k, spec.num_experts) > least:
            return f"a token chooses {spec.top_k} experts and a layer has {least} slots"
        return None

    def suits(self, layer, ids_TK: jax.Array) -> bool:
        """Whether a step with so many choices runs here: a layer of a decode step,
        whose number is none of the program's arguments."""
        if not isinstance(layer, int) or self.hindrance is not None:
            return False
        return len(ids_TK) <= MOST_ROWS and self._wave_rows(layer, ids_TK) > 0

    def _wave_rows(self, layer: int, ids_TK: jax.Array) -> int:
        """How many rows at once surely find room for their experts."""
        (T, K), slots = ids_TK.shape, self._device.capacity_L[layer]
        fits = min(T * K, self._device.spec.num_experts) <= slots
        return T if fits else slots // K

    def run(
        self,
        cache: Cache,
        layer: int,
        hidden_TD: jax.Array,
        routing: Routing,
        host_ER: jax.Array,
        expected: Expected | None = None,
        helped: Helped | None = None,
    ) -> tuple[Cache, jax.Array, UnderWay | None]:
        """As `fused_waves.run_through_slots`; waves of rows, known from shapes."""
        seen_TK, before, parts, under_way = routing.ids_TK, cache, [], None
        if helped is not None:
            routing = routing._replace(ids_TK=helped.ids_TK)
        ids_TK = routing.ids_TK
        experts_1E = jnp.arange(self._device.spec.num_experts, dtype=jnp.int32)[None]
        missed_E = jnp.zeros(experts_1E.shape[1:], bool)
        rows = self._wave_rows(layer, ids_TK)
        for first in range(0, len(ids_TK), rows):
            wave = jax.tree.map(
                lambda x, first=first: x[first : first + rows],
                (hidden_TD, routing, seen_TK),
            )
            given = cache, layer, *wave, host_ER
            found = self._run_wave(*given, None if first else expected)
            cache, part_PD, moved_B, begun = found
            under_way = under_way if first else begun
            missed_E |= jnp.any(moved_B[:, None] == experts_1E, axis=0)
            parts.append(part_PD)
        if len(parts) > 1:
            chosen_E = jnp.any(ids_TK.reshape(-1, 1) == experts_1E, axis=0)
            hit_E = chosen_E & ~missed_E
            cache = self._device.settle_hits(before, cache, layer, hit_E)
        rows_PD = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        if helped is not None:
            scale_P = routing.weights_TK.reshape(-1)
            rows_PD = self._assist.end(helped, rows_PD, scale_P)
        is_real_TK = seen_TK < self._device.spec.num_experts
        y_TD = add_ranks(jnp.zeros_like(hidden_TD), rows_PD, is_real_TK)
        return cache, y_TD, under_way

    def _run_wave(
        self, cache: Cache, layer: int, hidden_TD, routing, seen_TK, host_ER, expected
    ):
        ids_TK, weights_TK, scores_TE = routing
        given = ids_TK, scores_TE, seen_TK, expected and expected.ahead
        cache, rows, plan_2M = look_up(self._device, cache, layer, *given)
        under_way, hidden_TD = start(expected, plan_2M, hidden_TD)
        rows_PD, slots_SR = few.ffn(
            *(hidden_TD, cache.slots_SR, rows, ids_TK.shape[1]),
            *(self._layout, self._act),
            scale_P=weights_TK.reshape(-1),
            host_ER=host_ER,
        )
        return cache._replace(slots_SR=slots_SR), rows_PD, rows.host_B, under_way
