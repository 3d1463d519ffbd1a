"""Clusters by name: Prism's test bed, larger copies of it, and unequal machines."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_edge.core.checks import ConfigError, check_count, check_known, one_or_each
from moe_edge.hardware.presets import gpu, lan
from moe_edge.hardware.specs import Cluster, Server

# Share of GPU memory that Prism's study leaves to each model (section IV-A). Whether
# that includes the dense part is not said there; here it is for experts.
PRISM_MEMORY_SHARE = {"mixtral_8x7b": 0.70, "deepseek_v2_lite": 0.30}


def servers_of(
    gpus: Sequence[Sequence[str]],
    expert_memory_share: float | Sequence[float] = 1.0,
) -> tuple[Server, ...]:
    """Servers from the device presets of each; the share is one for all or one each."""
    shares = one_or_each("expert_memory_share", expert_memory_share, len(gpus))
    return tuple(
        Server(name=f"server{n + 1}", gpus=tuple(gpu(name, share) for name in names))
        for n, (names, share) in enumerate(zip(gpus, shares.tolist(), strict=True))
    )


def prism_cluster(
    num_gpus: int = 4, mbps: float = 500.0, expert_memory_share: float = 0.3
) -> Cluster:
    """Prism's servers with 1, 1 and 2 A100-40G, repeated up to `num_gpus`.

    500 Mbps by `tc`, which shapes all that leaves a host (section IV-A). Section IV-C
    does not say how 4 to 256 GPUs are grouped: here as in the test bed.
    """
    if num_gpus < 4 or num_gpus % 4:
        raise ConfigError(f"num_gpus must be a multiple of 4, got {num_gpus}")
    groups = [["a100_40g"], ["a100_40g"], ["a100_40g"] * 2] * (num_gpus // 4)
    return Cluster(
        servers=servers_of(groups, expert_memory_share),
        network=lan(mbps),
        sharing="egress",
    )


def mixed_cluster(
    gpus: Sequence[Sequence[str]] = (
        ("rtx_4090",),
        ("rtx_4060_ti", "rtx_4060_ti"),
        ("rtx_3090",),
    ),
    mbps: float = 500.0,
    slow_servers: Sequence[int] = (2,),
    slow_mbps: float = 100.0,
    expert_memory_share: float | Sequence[float] = 0.7,
) -> Cluster:
    """Unequal machines, some of them on a slower link (both ways)."""
    servers = servers_of(gpus, expert_memory_share)
    pairs = [
        pair
        for pair in itertools.permutations(range(len(servers)), 2)
        if not set(slow_servers).isdisjoint(pair)
    ]
    return Cluster(
        servers=servers,
        network=lan(mbps),
        links=dict.fromkeys(pairs, lan(slow_mbps)),
        sharing="egress",
    )


def measured_cluster(
    machine: str,
    num_servers: int = 3,
    gpus_per_server: int = 1,
    mbps: float = 500.0,
    expert_memory_share: float | Sequence[float] = 0.7,
) -> Cluster:
    """Equal machines as `profile_machine` wrote one to `machine`, on one network."""
    check_count("num_servers", num_servers)
    check_count("gpus_per_server", gpus_per_server)
    groups = [[machine] * gpus_per_server] * num_servers
    return Cluster(
        servers=servers_of(groups, expert_memory_share),
        network=lan(mbps),
        sharing="egress",
    )


CLUSTERS: Mapping[str, Callable[..., Cluster]] = {
    "prism": prism_cluster,
    "mixed": mixed_cluster,
}


def build_cluster(name: str, **options) -> Cluster:
    """A cluster by name, with the options of its function.

    Args:
      name: one of CLUSTERS, or the path of a machine.json (`measured_cluster`).
    Raises:
      ConfigError: what it refuses; OSError: a machine.json that cannot be read.
    """
    if name.endswith(".json"):
        build = functools.partial(measured_cluster, name)
    else:
        check_known("cluster preset", name, CLUSTERS)
        build = CLUSTERS[name]
    try:
        return build(**options)
    except TypeError as error:
        raise ConfigError(f"cluster preset {name}: {error}") from error


def cluster_for(
    model: str, name: str, options: Mapping[str, Any] | None = None
) -> Cluster:
    """`build_cluster` for a model: on Prism's, the share of memory that Prism gives it.

    Args:
      options: of the cluster's function; they come before Prism's share.
    """
    usual = {}
    if name == "prism" and model in PRISM_MEMORY_SHARE:
        usual = {"expert_memory_share": PRISM_MEMORY_SHARE[model]}
    return build_cluster(name, **usual | dict(options or {}))
