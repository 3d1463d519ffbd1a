"""EPLB, DeepSeek's balancer with redundant experts: exact, and for unequal servers."""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import register
from moe_edge.place.baselines import balance, gpu_list, layer_slots
from moe_edge.place.placer import Placer
from moe_edge.place.plan import ABSENT, Placement
from moe_edge.place.problem import Problem


def balanced_pack(weight_X: np.ndarray, bins: int) -> np.ndarray:
    """int64 [bins, X / bins]: the items of every bin, equally many.

    Heaviest first (stable), each to the lightest bin that is not full (the first of
    equals). One item a bin: item i goes to bin i.
    """
    each = len(weight_X) // bins
    if each == 1:
        return np.arange(bins)[:, None]
    bin_X = balance(weight_X, np.full(bins, each))
    order_X = np.argsort(-weight_X, kind="stable")
    return order_X[np.argsort(bin_X[order_X], kind="stable")].reshape(bins, each)


def replicate(
    weight_X: np.ndarray, slots: int, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Item of every replica [slots], and how many replicas each item has [X].

    One copy of each, then copies of the item with the largest weight / copies (the
    first of equals), at most `most` of one item.
    """
    items = len(weight_X)
    copies_X = np.ones(items, np.int64)
    item_R = np.concatenate([np.arange(items), np.zeros(slots - items, np.int64)])
    for replica in range(items, slots):
        each_X = weight_X / copies_X
        item = int(np.where(copies_X < (most or slots), each_X, -np.inf).argmax())
        item_R[replica] = item
        copies_X[item] += 1
    return item_R, copies_X


def rebalance(
    load_LE: np.ndarray, replicas: int, groups: int, nodes: int, gpus: int
) -> np.ndarray:
    """EPLB's hierarchical balancing for equal GPUs.

    Args:
      load_LE: calls of each block.
      replicas: slots of a layer on all GPUs together.
      groups: of experts; they stay on one node if `nodes` divides them.
      nodes, gpus: of the cluster.
    Returns:
      Block of every slot [L, replicas], GPU by GPU.
    Raises:
      ConfigError: numbers that do not divide each other as EPLB needs.
    Source: github.com/deepseek-ai/EPLB (README), written from its description.
    """
    load_LE = np.asarray(load_LE, np.float64)
    E = load_LE.shape[1]
    if groups % nodes:
        groups = nodes = 1
    for name, large, small in (
        ("groups must divide blocks", E, groups),
        ("nodes must divide GPUs", gpus, nodes),
        ("GPUs must divide replicas", replicas, gpus),
    ):
        if large % small:
            raise ConfigError(f"EPLB: {name}, got {small} and {large}")
    if replicas < E:
        raise ConfigError(f"EPLB: {replicas} replicas for {E} blocks, expected no less")
    sizes = (replicas, groups, nodes, gpus)
    return np.stack([_rebalance_layer(load_E, *sizes) for load_E in load_LE])


def _rebalance_layer(load_E, replicas: int, groups: int, nodes: int, gpus: int):
    size = len(load_E) // groups
    slots_of_node = []
    for groups_X in balanced_pack(load_E.reshape(groups, size).sum(axis=1), nodes):
        blocks = (groups_X[:, None] * size + np.arange(size)).ravel()
        item_R, copies_X = replicate(load_E[blocks], replicas // nodes)
        weight_R = (load_E[blocks] / copies_X)[item_R]
        slots_GS = balanced_pack(weight_R, gpus // nodes)
        slots_of_node.append(blocks[item_R[slots_GS]].ravel())
    return np.concatenate(slots_of_node)


@register
@dataclasses.dataclass(frozen=True)
class Eplb(Placer):
    """EPLB as published: equal servers, equal GPUs, equally many slots a layer.

    Two copies on one server are one in a placement (the first GPU keeps it): they
    spread load there, but save no remote call.

    Attributes:
      groups: of experts (DeepSeek's group-limited routing); 1 for others.
    """

    name: ClassVar[str] = "eplb"
    SOURCE: ClassVar[str] = "EPLB, github.com/deepseek-ai/EPLB"
    groups: int = 1

    def unfit(self, problem: Problem) -> str | None:
        _, L, E = problem.frequency_NLE.shape
        flat = np.concatenate(problem.slots)
        if len({len(s) for s in problem.slots}) > 1 or len(set(flat.tolist())) > 1:
            listed = [slots_G.tolist() for slots_G in problem.slots]
            return (
                f"eplb needs equal servers with equal GPUs, slots are {listed}; use "
                "eplb_heterogeneous"
            )
        if (each := flat[0] // L) * len(flat) < E:
            return (
                f"EPLB gives every GPU {each} slots of each of {L} layers: "
                f"{each * len(flat)} on {len(flat)} GPUs hold no copy of {E} blocks; "
                "use eplb_heterogeneous"
            )
        return None

    def assign(self, problem: Problem) -> Placement:
        N, L, E = problem.frequency_NLE.shape
        flat = np.concatenate(problem.slots)
        gpus, each = len(flat), min(int(flat[0]) // L, E)
        load_LE = problem.frequency_NLE.sum(axis=0)
        block_LR = rebalance(load_LE, each * gpus, self.groups, N, gpus)
        server_D, gpu_D = gpu_list(problem.slots)
        gpu_NLE = np.full((N, L, E), ABSENT, np.int8)
        layer_L1 = np.arange(L)[:, None]
        for gpu in reversed(range(gpus)):  # so that the first GPU of a server wins
            blocks_LS = block_LR[:, gpu * each : (gpu + 1) * each]
            gpu_NLE[server_D[gpu], layer_L1, blocks_LS] = gpu_D[gpu]
        return Placement(gpu_NLE)


@register
@dataclasses.dataclass(frozen=True)
class EplbHeterogeneous(Placer):
    """EPLB for unequal memory and speed, as Prism compares with.

    Every layer gets its share of each GPU; the busiest blocks get copies, at most one
    a server; copies go, heaviest first, where load / (slots x speed) is least.
    """

    name: ClassVar[str] = "eplb_heterogeneous"
    SOURCE: ClassVar[str] = "EPLB, in the heterogeneous form of Prism, section IV-A"

    def assign(self, problem: Problem) -> Placement:
        N, L, E = problem.frequency_NLE.shape
        server_D, gpu_D = gpu_list(problem.slots)
        limit_D = np.minimum(np.concatenate(problem.slots), L * E)
        slots_LD = layer_slots(limit_D, L)
        speed_D = np.concatenate(problem.speeds)
        load_LE = problem.frequency_NLE.sum(axis=0)
        gpu_NLE = np.full((N, L, E), ABSENT, np.int8)
        for layer in range(L):
            on_DE = pack_unequal(load_LE[layer], slots_LD[layer], speed_D, server_D)
            gpus, blocks = np.nonzero(on_DE)
            gpu_NLE[server_D[gpus], layer, blocks] = gpu_D[gpus]
        return Placement(gpu_NLE)


def pack_unequal(
    load_E: np.ndarray, slots_D: np.ndarray, speed_D: np.ndarray, server_D: np.ndarray
) -> np.ndarray:
    """bool [D, E]: blocks of a layer on GPUs, none twice on a server.

    Args:
      load_E: calls of each block.
      slots_D: room of each GPU in this layer; in all at least E.
      speed_D: of each GPU, any unit.
      server_D: the server of each GPU.
    """
    servers, E = int(server_D.max()) + 1, len(load_E)
    room_N = np.minimum(np.bincount(server_D, slots_D, servers), E)
    item_R, copies_E = replicate(load_E, int(room_N.sum()), servers)
    each_E = load_E / copies_E
    power_D = np.maximum(slots_D, 1) * speed_D
    free_D, busy_D = slots_D.copy(), np.zeros(len(slots_D))
    held_NE = np.zeros((servers, E), bool)
    on_DE = np.zeros((len(slots_D), E), bool)

    def put(block: int) -> bool:
        open_D = (free_D > 0) & ~held_NE[server_D, block]
        if not open_D.any():
            return False
        then_D = (busy_D + each_E[block]) / power_D
        gpu = int(np.where(open_D, then_D, np.inf).argmin())
        free_D[gpu] -= 1
        busy_D[gpu] += each_E[block]
        on_DE[gpu, block] = held_NE[server_D[gpu], block] = True
        return True

    left = [int(b) for b in item_R[np.argsort(-each_E[item_R], kind="stable")]]
    placed = [put(block) for block in left]
    # A copy whose servers are full leaves a slot to the next block that fits there.
    for block in np.argsort(-each_E, kind="stable"):
        if not all(placed):
            while put(int(block)):
                pass
    return on_DE
