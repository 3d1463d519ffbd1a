"""Eviction policies by name. Their shared interface is evict_base.EvictionPolicy."""

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import Registry
from moe_edge.offload.evict_base import CacheSpec, EvictionPolicy, State, put
from moe_edge.offload.evict_belady import Belady
from moe_edge.offload.evict_lfu import Lfu, StaticOracle, StaticPrompt
from moe_edge.offload.evict_lru import Lru, OnDemand
from moe_edge.offload.evict_moe_infinity import MoeInfinity
from moe_edge.offload.evict_scores import HybriMoe, SmoeScore
from moe_edge.offload.evict_successor import Successor

__all__ = [
    "EVICTION_KINDS",
    "POLICIES",
    "CacheSpec",
    "EvictionPolicy",
    "State",
    "check_needs",
    "get_policy",
    "put",
]

_KINDS = (Lru, Lfu, StaticPrompt, StaticOracle, SmoeScore, HybriMoe, MoeInfinity)
POLICIES = {kind.name: kind for kind in (*_KINDS, Successor, Belady, OnDemand)}
EVICTION_KINDS = Registry(
    "eviction policy", EvictionPolicy, POLICIES, "eviction_options"
)


def get_policy(policy: str | type | EvictionPolicy, **options) -> EvictionPolicy:
    """The policy of a name, a class, or an object.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    return EVICTION_KINDS.make(policy, options)


def check_needs(policy: EvictionPolicy, available) -> None:
    """Raises ConfigError unless `available` holds all fields the policy needs."""
    missing = sorted(policy.needs - set(available))
    if missing:
        raise ConfigError(
            f"policy {policy.name} needs {', '.join(missing)}, which is not there "
            f"(there is: {', '.join(sorted(available))}); use another policy"
        )
