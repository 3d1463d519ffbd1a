"""Placement problems for tests: random statistics, unequal memory, references."""

import itertools

import numpy as np

from moe_edge.hardware.cost_model import BlockShape, CostModel
from moe_edge.hardware.specs import Cluster, Device, Gpu, Link, Server


def frequencies(servers, layers, experts, seed=0, skew=1.0, shared=0.3):
    """float64 [N, L, E]: Zipf, partly in the same order on all servers."""
    rng = np.random.default_rng(seed)
    base_E = np.arange(1, experts + 1) ** -skew
    frequency_NLE = np.empty((servers, layers, experts))
    for layer in range(layers):
        common_E = rng.permutation(base_E)
        for server in range(servers):
            own_E = rng.permutation(base_E)
            frequency_NLE[server, layer] = shared * common_E + (1 - shared) * own_E
    return frequency_NLE / frequency_NLE.sum(axis=-1, keepdims=True)


def unequal_slots(servers, blocks, ratio, seed=0, gpus=(1,)):
    """Slots of at least `ratio` copies of the model in all, very unequally."""
    rng = np.random.default_rng(seed)
    weight_N = rng.uniform(0.2, 1.8, servers)
    total_N = np.floor(weight_N / weight_N.sum() * blocks * ratio).astype(int)
    total_N = np.maximum(total_N, 1)
    while total_N.sum() < blocks * ratio:
        total_N[rng.integers(servers)] += 1
    slots = []
    for server, total in enumerate(total_N):
        count = gpus[server % len(gpus)]
        cuts = np.sort(rng.integers(0, total + 1, count - 1))
        slots.append(np.diff(np.concatenate([[0], cuts, [total]])))
    return slots


def all_choices(capacity_N, items):
    """Every bool [N, M] that covers all items within the capacities, all slots used."""
    choices = [
        [np.isin(np.arange(items), c) for c in itertools.combinations(range(items), n)]
        for n in capacity_N
    ]
    for rows in itertools.product(*choices):
        on_NM = np.array(rows)
        if on_NM.any(axis=0).all():
            yield on_NM


def device(name="gpu", flops=1e12, rate=1e11, call_s=0.0):
    return Device(
        name=name,
        memory_bytes=10**9,
        flops_per_s=flops,
        memory_bytes_per_s=rate,
        source="test",
        call_s=call_s,
    )


def cluster(gpus=((1.0,), (1.0,), (1.0,)), rate=1e6, links=None, sharing="egress"):
    """Servers whose GPUs have these relative speeds; all links `rate` bytes/s."""
    servers = tuple(
        Server(
            name=f"server{n}",
            gpus=tuple(
                Gpu(
                    device=device(f"gpu{speed}", 1e12 * speed, 1e11 * speed),
                    host_link=Link(bytes_per_s=1e9, source="test"),
                )
                for speed in speeds
            ),
        )
        for n, speeds in enumerate(gpus)
    )
    network = Link(bytes_per_s=rate, latency_s=1e-3, source="test")
    return Cluster(servers=servers, network=network, links=links or {}, sharing=sharing)


def cost_model(**options):
    """Blocks of 8 x 4 values of 2 bytes on `cluster`."""
    return CostModel(cluster(**options), BlockShape(8, 4, 2))
