"""Makes the node of one of OD-MoE's processes: main, shadow or a worker."""

from collections.abc import Callable

from moe_edge.cluster.node.engine import dense_weights
from moe_edge.cluster.node.node import Node
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.roles import MAIN, SHADOW
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.engine.weights import Weights
from moe_edge.offload.store import HostStore, device_dtype
from moe_edge.papers.od_moe.cluster.groups import Groups
from moe_edge.papers.od_moe.cluster.main import MainNode
from moe_edge.papers.od_moe.cluster.shadow_node import ShadowNode
from moe_edge.papers.od_moe.cluster.worker import Worker, WorkerNode
from moe_edge.papers.od_moe.options import OdMoeOptions
from moe_edge.papers.od_moe.shadow.engine import ShadowEngine, make_shadow
from moe_edge.papers.od_moe.shadow.predictor import PRECISIONS, Shadow


class Parts:
    """What nodes are made of, from an open checkpoint."""

    def __init__(self, reader):
        self.reader = reader

    def weights(self) -> Weights:
        """All but the experts."""
        return dense_weights(self.reader)

    def programs(self) -> PlacedPrograms:
        return PlacedPrograms(self.reader.config, device_dtype(self.reader.dtype))

    def shadow(self, precision: str) -> ShadowEngine:
        return make_shadow(self.weights(), precision, HostStore(self.reader))


def make_node(
    number: int,
    options: OdMoeOptions,
    transport: Transport,
    reader,
    kind: Callable[..., Parts] = Parts,
) -> Node:
    """The node of process `number`."""
    parts = kind(reader)
    config, K = parts.reader.config, parts.reader.config.moe.top_k
    groups = Groups(options.workers, options.groups, K)
    named = options.shadow in PRECISIONS
    precision = options.shadow if named else "full"
    periods = Shadow(precision, options.token_period, options.kv_period)
    if options.shadow == "random":
        periods = Shadow(precision, 0, 0)  # nothing to align
    if number == MAIN:
        of_model = parts.reader, parts.weights(), parts.programs()
        return MainNode(number, *of_model, transport, groups, periods)
    if number == SHADOW:
        shadow = parts.shadow(precision) if named else None
        shape = config.moe_layers, config.moe.num_experts, K
        return ShadowNode(
            *(number, transport, groups, *shape, shadow, periods),
            speculative=options.departure == "speculative",
            seed=options.seed,
        )
    worker = Worker(
        parts.reader, parts.programs(), groups.slots * options.worker_layers
    )
    return WorkerNode(number, transport, worker)
