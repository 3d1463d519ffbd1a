"""What is to be placed where: from measured counts, or from presets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.typed import check_64_bits
from moe_edge.evaluate.texts import sha256_of
from moe_edge.hardware.clusters import cluster_for, servers_of
from moe_edge.hardware.cost_model import CostModel
from moe_edge.hardware.models import model_shape
from moe_edge.hardware.presets import lan
from moe_edge.hardware.specs import Cluster
from moe_edge.place.counted_model import PRESETS, counted_model
from moe_edge.place.problem import Problem, Traffic
from moe_edge.place.statistics import read_statistics
from moe_edge.workload.routing_model import BIGBENCH, RoutingModel

# Statistics and slots say nothing of machines: without --cluster these are assumed, and
# said, for placers and predictions that look at time.
ASSUMED_GPU, ASSUMED_MBPS = "a100_40g", 500.0


def statistics_case(
    path: str | Path,
    model: str | None,
    top_k: int | None,
    server_domains: str | None,
    slots: str | None,
    checkpoint: str | None,
    d_model: int | None,
    expert_dim: int | None,
    cluster: str | None,
    cluster_options: Mapping[str, Any],
) -> tuple[Problem, dict[str, Any]]:
    """What is to be placed, from measured counts, and facts for the report."""
    if server_domains is None or (slots is None and cluster is None):
        raise ConfigError(
            "--statistics needs --server_domains (one a server) and --slots or "
            "--cluster, such as --server_domains c4,github,book --slots 80,80,160"
        )
    domains = server_domains.split(",")
    stats = read_statistics(path, domains, model, top_k)
    counted = counted_model(stats.model, checkpoint, d_model, expert_dim)
    counted.check(stats.layers, stats.frequency_NLE.shape[2], path)
    if cluster is None:
        held = parse_slots(slots or "")
        servers = servers_of([[ASSUMED_GPU] * len(slots_G) for slots_G in held])
        machines = Cluster(servers=servers, network=lan(ASSUMED_MBPS))
        assumed = (
            f"{ASSUMED_GPU} GPUs, {ASSUMED_MBPS:.0f} Mbps between servers; name your "
            "machines with --cluster"
        )
    else:
        preset = PRESETS.get(stats.model, stats.model)
        machines = cluster_for(preset, cluster, cluster_options)
        fits = machines.slots(counted.block.num_bytes)
        held, assumed = fits if slots is None else parse_slots(slots), None
        if [len(slots_G) for slots_G in held] != [len(slots_G) for slots_G in fits]:
            raise ConfigError(
                f"--slots {slots} names {[len(slots_G) for slots_G in held]} GPUs a "
                f"server, cluster {cluster} has {[len(slots_G) for slots_G in fits]}"
            )
    facts = {
        "statistics": str(path),
        "statistics_sha256": sha256_of(path),
        "model": stats.model,
        "layers": list(stats.layers),
        "server_domains": domains,
        "slots": [slots_G.tolist() for slots_G in held],
        "block": [counted.block.d_model, counted.block.expert_dim],
        "block_bytes": counted.block.num_bytes,
        "block_from": counted.source,
        "cluster": cluster,
        "cluster_options": dict(cluster_options),
        "coverage": counted.coverage(stats.layers) or None,
        "assumed": assumed,
    }
    traffic = Traffic(stats.top_k)
    costs = CostModel(machines, counted.block)
    return Problem(stats.frequency_NLE, held, costs, traffic=traffic), facts


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
