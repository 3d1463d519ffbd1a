"""When which block travels over which link, for an adopted migration.

One block after another on every link. A block that a server lacks comes from the host
memory of its own server, or over the network from a server that holds it now: network
first, then the link to the GPU; both links work at once on different blocks.
"""

import dataclasses

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.migrate import SOURCES, arrivals
from moe_edge.place.plan import Placement


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One block on its way, seconds from the start of the migration.

    Attributes:
      layer, block: what.
      server, gpu: where to.
      source: the server it comes from.
      start_s: of the first byte; sent_s: the network link is free again (equals
        start_s from host memory); ready_s: the block can be used.
    """

    layer: int
    block: int
    server: int
    gpu: int
    source: int
    start_s: float
    sent_s: float
    ready_s: float


def schedule(
    current: Placement,
    candidate: Placement,
    cost_model: CostModel,
    calls_NLE: np.ndarray,
    source: str = "host",
) -> list[Transfer]:
    """All arrivals, most called first, each as early as its links allow.

    Args:
      current, candidate: placements.
      cost_model: rates of links; its cluster says which share one.
      calls_NLE: what calls the blocks; orders them.
      source: "host" if every host memory holds the model, else "network".
    Raises:
      ConfigError: unknown source, or a block that nobody holds now.
    """
    check_known("source of blocks", source, SOURCES)
    moves_X4 = arrivals(current, candidate)
    server_X, _, layer_X, block_X = moves_X4.T
    calls_X = calls_NLE[server_X, layer_X, block_X]
    link_free: dict[tuple[int, int], float] = {}
    gpu_free: dict[tuple[int, int], float] = {}
    transfers = []
    for move in np.argsort(-calls_X, kind="stable"):
        server, gpu, layer, block = moves_X4[move].tolist()
        origin, start_s, sent_s, there_s = server, 0.0, 0.0, 0.0
        if source == "network" and not current.on_NLE[server, layer, block]:
            holders = np.flatnonzero(current.on_NLE[:, layer, block]).tolist()
            if not holders:
                raise ConfigError(
                    f"no server holds block {block} of layer {layer} now: it can only "
                    "come from host memory (source 'host')"
                )
            options = [
                (*_over_network(cost_model, m, server, link_free), m) for m in holders
            ]
            there_s, sent_s, start_s, origin = min(options)
            link_free[_link(cost_model, origin, server)] = sent_s
        begin_s = max(there_s, gpu_free.get((server, gpu), 0.0))
        ready_s = begin_s + cost_model.load_s(server, gpu)
        gpu_free[server, gpu] = ready_s
        if origin == server:
            start_s = sent_s = begin_s
        transfers.append(
            Transfer(layer, block, server, gpu, origin, start_s, sent_s, ready_s)
        )
    return transfers


def _link(cost_model: CostModel, n: int, m: int) -> tuple[int, int]:
    """What a message from n to m occupies: its pair's link, or all that n sends."""
    return (n, m) if cost_model.cluster.sharing == "pair" else (n, -1)


def _over_network(cost_model: CostModel, n: int, m: int, link_free: dict):
    """Arrival, end and start of a block's way from n to m."""
    link = cost_model.cluster.link(n, m)
    start_s = link_free.get(_link(cost_model, n, m), 0.0)
    sent_s = start_s + link.busy_s(cost_model.block.num_bytes)
    return sent_s + link.latency_s, sent_s, start_s
