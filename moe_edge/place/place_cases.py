"""What `run_place` places: measured counts, or a preset model on preset machines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_64_bits
from moe_edge.evaluate.texts import sha256_of
from moe_edge.hardware.clusters import cluster_for, servers_of
from moe_edge.hardware.cost_model import BlockShape, CostModel
from moe_edge.hardware.models import model_shape
from moe_edge.hardware.presets import lan
from moe_edge.hardware.specs import Cluster
from moe_edge.place.placer import Problem, Traffic
from moe_edge.place.statistics import read_statistics
from moe_edge.workload.routing_model import BIGBENCH, RoutingModel

# Statistics say nothing of machines: these are assumed for whoever looks at time.
ASSUMED_GPU, ASSUMED_MBPS = "a100_40g", 500.0
KNOWN = {  # names in statistics
    "Mixtral-8x7B-v0.1": "mixtral_8x7b",
    "OLMoE-1B-7B-0924": "olmoe_1b_7b",
}
UNKNOWN_LIKE = "OLMoE-1B-7B-0924"  # any other model's block, unless told


def statistics_case(
    path: str | Path,
    model: str | None,
    top_k: int | None,
    server_domains: str | None,
    slots: str | None,
    d_model: int | None = None,
    expert_dim: int | None = None,
) -> tuple[Problem, dict[str, Any]]:
    """What is to be placed, from measured counts, and facts for the report."""
    if server_domains is None or slots is None:
        raise ConfigError(
            "--statistics needs --server_domains (one a server) and --slots, such as "
            "--server_domains c4,github,book --slots 80,80,160"
        )
    stats = read_statistics(path, server_domains.split(","), model, top_k)
    block, assumed_block = block_of(stats.model, d_model, expert_dim)
    held = parse_slots(slots)
    machines = servers_of([[ASSUMED_GPU] * len(slots_G) for slots_G in held])
    cost_model = CostModel(Cluster(servers=machines, network=lan(ASSUMED_MBPS)), block)
    facts = {
        "statistics": str(path),
        "statistics_sha256": sha256_of(path),
        "model": stats.model,
        "layers": list(stats.layers),
        "server_domains": list(stats.domains),
        "slots": [slots_G.tolist() for slots_G in held],
        "block": [block.d_model, block.expert_dim],
        "assumed": f"{ASSUMED_GPU} GPUs, {ASSUMED_MBPS:.0f} Mbps between servers"
        + assumed_block,
    }
    traffic = Traffic(stats.top_k)
    return Problem(stats.frequency_NLE, held, cost_model, traffic=traffic), facts


def block_of(
    model: str, d_model: int | None, expert_dim: int | None
) -> tuple[BlockShape, str]:
    """The block of a model in statistics, and what of it is assumed, for the report."""
    if (d_model is None) != (expert_dim is None):
        raise ConfigError(
            f"--d_model is {d_model}, --expert_dim is {expert_dim}; give both or none"
        )
    if d_model is not None:
        return BlockShape(d_model, expert_dim, 2), ""
    if model in KNOWN:
        return model_shape(KNOWN[model]).block, ""
    block = model_shape(KNOWN[UNKNOWN_LIKE]).block
    return block, (
        f", blocks of {block.d_model} x {block.expert_dim} as {UNKNOWN_LIKE}'s (give "
        "--d_model and --expert_dim)"
    )


def preset_case(
    model: str,
    cluster: str,
    cluster_options: Mapping[str, Any],
    server_domains: str | None,
) -> tuple[Problem, dict[str, Any]]:
    """The same from presets; routing from the committed generator."""
    shape = model_shape(model)
    machines = cluster_for(model, cluster, cluster_options)
    N = machines.num_servers
    domains = list(BIGBENCH) if server_domains is None else server_domains.split(",")
    if server_domains is None:
        domains = [domains[n % len(domains)] for n in range(N)]
    if len(domains) != N:
        raise ConfigError(
            f"--server_domains names {len(domains)} domains, cluster {cluster} has {N} "
            "servers; name one a server"
        )
    routing = RoutingModel.like(shape)
    by_domain = {domain: routing.frequencies(domain) for domain in set(domains)}
    cost_model = shape.costs(machines)
    fits = machines.slots(shape.block.num_bytes)
    facts = {
        "model": shape.name,
        "cluster": cluster,
        "cluster_options": dict(cluster_options),
        "routing": f"generator fitted to {routing.source}",
        "server_domains": domains,
        "slots": [slots_G.tolist() for slots_G in fits],
    }
    frequency_NLE = np.stack([by_domain[domain] for domain in domains])
    traffic = Traffic(shape.top_k)
    return Problem(frequency_NLE, fits, cost_model, traffic=traffic), facts


def parse_slots(text: str) -> list[np.ndarray]:
    """`80,80,80+80` -> one int array a server, one number a GPU."""
    servers = []
    for part in str(text).split(","):
        numbers = [number.strip() for number in part.split("+")]
        if not all(n.isascii() and n.isdigit() and len(n) < 20 for n in numbers):
            raise ConfigError(
                f"--slots is {str(text)!r}, expected whole numbers separated by commas"
                ", such as 80,80,160 (80+80: a server of two GPUs)"
            )
        slots_G = [int(n) for n in numbers]
        check_64_bits("--slots", slots_G)
        servers.append(np.array(slots_G, np.int64))
    return servers
