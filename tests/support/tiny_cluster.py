"""Clusters whose times are binary fractions, so that hand-computed ones are exact.

A block takes 1/4 s and the dense part of a layer 1/2 s, whatever the tokens; a hidden
state occupies a link for 1/8 s and comes 1/16 s later; a copy from host memory occupies
its link for 1 s and comes 1/8 s later.
"""

import dataclasses

import numpy as np

from moe_edge.hardware.cost_model import BlockShape, CostModel, DenseLayer
from moe_edge.hardware.specs import Cluster, Device, Gpu, Link, Server
from moe_edge.place.placer import Placer
from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.simulate.cluster.report import ClusterResult
from moe_edge.workload.requests import Request

BLOCK = BlockShape(d_model=8, expert_dim=16, bytes_per_value=2)  # 768 bytes, 16 a state
BLOCK_S, DENSE_S, STATE_S, LATE_S = 0.25, 0.5, 0.125, 0.0625
LOAD_S, LOAD_LATE_S = 1.0, 0.125


def tiny_cluster(gpus=(1, 1), slots=4, sharing="pair", free_network=False) -> Cluster:
    """Servers with so many GPUs each, every GPU with room for `slots` blocks."""
    device = Device(
        name="tiny",
        memory_bytes=10**9,
        flops_per_s=2.0**60,
        memory_bytes_per_s=BLOCK.num_bytes / BLOCK_S,
        source="test",
    )
    gpu = Gpu(
        device=device,
        host_link=Link(
            bytes_per_s=BLOCK.num_bytes / LOAD_S, latency_s=LOAD_LATE_S, source="test"
        ),
        expert_memory_bytes=slots * BLOCK.num_bytes,
    )
    network = Link(
        bytes_per_s=float("inf") if free_network else BLOCK.token_bytes / STATE_S,
        latency_s=0.0 if free_network else LATE_S,
        source="test",
    )
    servers = tuple(
        Server(name=f"server{n}", gpus=(gpu,) * count) for n, count in enumerate(gpus)
    )
    return Cluster(servers=servers, network=network, sharing=sharing)


def tiny_costs(*args, **kwargs) -> CostModel:
    """The cost model of such a cluster."""
    dense = DenseLayer(1.0, int(BLOCK.num_bytes * DENSE_S / BLOCK_S))
    return CostModel(tiny_cluster(*args, **kwargs), BLOCK, dense)


def constant_pools(num_experts: int, **ids_LK) -> RoutingPools:
    """Domains whose every token chooses the same experts [L][K]."""
    ids = {name: np.array([rows, rows], np.int16) for name, rows in ids_LK.items()}
    return RoutingPools(ids, num_experts)


def asked(*rows) -> list[Request]:
    """Requests from (server, arrival_s, input_tokens, output_tokens, domain)."""
    return [Request(number, *row) for number, row in enumerate(rows)]


def placed(*rows) -> Placement:
    """A placement from gpu numbers [N][L][E], -1 where absent."""
    return Placement(np.array(rows))


@dataclasses.dataclass(frozen=True)
class Fixed(Placer):
    """Always one placement."""

    name = "fixed"
    SOURCE = "test"
    target: list

    def assign(self, problem):
        return Placement(np.array(self.target))


def run(requests, placement, costs, pools, max_batch=1, **kwargs):
    """The loop after its run, and its report."""
    options = LoopOptions(max_batch, window_s=kwargs.pop("window_s", 60.0))
    loop = ClusterLoop(requests, placement, costs, pools, options, 0, **kwargs)
    loop.run()
    return loop, ClusterResult(loop)
