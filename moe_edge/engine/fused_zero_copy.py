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
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_lookup import look_up, own_choice
from moe_edge.kernels import few
from moe_edge.kernels.rows import are_possible
from moe_edge.model.config import ModelConfig
from moe_edge.model.expert_groups import add_ranks
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from moe_edge.model.router import Routing

MOST_ROWS = 16  # of a step, as of the form `pairs`


def check_zero_copy(config: ModelConfig) -> None:
    """Raises ConfigError where kernels cannot read this model's records in place."""
    if not are_possible():
        raise ConfigError(
            "zero_copy is True, and only a GPU's kernels read the host's memory (here "
            f"is {jax.default_backend()}, or MOE_EDGE_KERNELS says xla); leave it out"
        )
    if (kind := config.moe.expert_kind) is not None:
        raise ConfigError(
            f"zero_copy is True and the experts are {kind}; its kernel reads bfloat16 "
            "and float32: leave it out"
        )
    if (name := config.moe.activation) == "gelu":  # Triton has no `erf`
        raise ConfigError(
            f"zero_copy is True and the experts' activation {name}, which its kernel "
            "lacks; leave it out"
        )


class ZeroCopy:
    """Runs a layer's experts without a loop, where that can be done.

    Args:
      device: whose slots and policy they are.
      config: the model.
    Raises:
      ConfigError: see `check_zero_copy`.
    """

    def __init__(self, device: DeviceCache, config: ModelConfig):
        check_zero_copy(config)
        self._device, moe = device, config.moe
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
        if not self._fits(spec.top_k):
            return (
                f"a token chooses {spec.top_k} experts and a layer has "
                f"{self._device.least_capacity} slots"
            )
        return None

    def suits(self, layer, ids_TK: jax.Array) -> bool:
        """Whether a step with so many choices runs here: a layer of a decode step,
        whose number is none of the program's arguments."""
        if not isinstance(layer, int):
            return False
        T, K = ids_TK.shape
        return T <= MOST_ROWS and self._fits(T * K) and self.hindrance is None

    def _fits(self, pairs: int) -> bool:
        """Whether the experts of so many pairs surely fit a layer's slots."""
        device = self._device
        return min(pairs, device.spec.num_experts) <= device.least_capacity

    def run(
        self, cache: Cache, layer: int, hidden_TD: jax.Array, routing: Routing, host_ER
    ) -> tuple[Cache, jax.Array]:
        """As `fused_waves.run_through_slots`."""
        ids_TK, weights_TK, scores_TE = routing
        given = ids_TK, scores_TE
        cache, rows, pair_P = look_up(self._device, cache, layer, *given)
        rows_PD, slots_SR = few.ffn(
            *(hidden_TD, cache.slots_SR, rows, pair_P),
            *(self._layout, self._act),
            scale_P=weights_TK.reshape(-1),
            host_ER=host_ER,
        )
        is_real_TK = ids_TK < self._device.spec.num_experts
        y_TD = add_ranks(jnp.zeros_like(hidden_TD), rows_PD, is_real_TK)
        return cache._replace(slots_SR=slots_SR), y_TD
