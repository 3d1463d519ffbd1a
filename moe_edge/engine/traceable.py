"""Whether policies and routes that are not ours run inside jit, as mode fused needs.

Each is traced once before an engine is made, so that what is wrong shows there and not
in the middle of a first step.
"""

import jax
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import is_ours
from moe_edge.engine.fused_cache import DeviceCache
from moe_edge.model.config import ModelConfig
from moe_edge.offload.evict_base import CacheSpec, Eviction
from moe_edge.route.base import Route, check_kinds


def check_traceable(
    config: ModelConfig, spec: CacheSpec, policy: Eviction, route: Route
) -> None:
    """Raises ConfigError for a policy or route that says it is for the host, or that
    fails inside jit; ours are known to run there."""
    cache = DeviceCache(spec, policy, config.moe_layers)  # refuses one for the host
    layer, E, K = config.moe_layers[0], spec.num_experts, spec.top_k
    ids, scores = ((1, K), np.int32), ((1, E), np.float32)
    if not is_ours(policy):
        own = [n for n in ("order", "victim") if _is_own(policy, n, Eviction)]
        if own == ["order"]:
            raise ConfigError(
                f"eviction policy {policy.name} has an order of its own, which only "
                "the host asks for; write value or victim, or use mode layered"
            )

        def look_up(slots_SR, host_ER, ids_TK, scores_TE):
            empty = cache.empty(slots_SR)
            return cache.acquire(empty, layer, ids_TK, scores_TE, host_ER)[0]

        records = ((spec.num_slots, 1), np.float32), ((E, 1), np.float32)
        _trace(f"eviction policy {policy.name}", look_up, *records, ids, scores)
    if route.host_only:
        raise ConfigError(
            f"route policy {route.name} runs on the host only; use mode layered"
        )
    if not is_ours(route):

        def choose(scores_TE, resident_E, ids_TK, weights_TK):
            given = layer, scores_TE, resident_E, config.moe, ids_TK, weights_TK
            return route.route(*given)

        weights, resident = ((1, K), np.float32), ((E,), np.bool_)
        given = choose, scores, resident, ids, weights
        found = _trace(f"route policy {route.name}", *given)
        check_kinds(route, found)
        shapes = [each.shape for each in found]
        if shapes != [(1, K), (1, K)]:
            raise ConfigError(
                f"route policy {route.name} gave arrays of shapes {shapes} for one "
                f"token, expected ids and weights of {(1, K)} each"
            )


def _is_own(policy, method: str, base: type) -> bool:
    return getattr(type(policy), method) is not getattr(base, method)


def _trace(what: str, function, *shapes):
    """Shapes of what a function gives; ConfigError: it cannot be traced."""
    try:
        return jax.eval_shape(
            function, *(jax.ShapeDtypeStruct(*each) for each in shapes)
        )
    except Exception as error:  # whatever another author's code raises
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(
            f"{what} cannot run inside jit, where mode fused calls it: "
            f"{type(error).__name__}: {reason} (compute with "
            "moe_edge.core.arrays.module_of, or set host_only = True and use mode "
            "layered)"
        ) from error
