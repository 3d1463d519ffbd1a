"""Whether to change a placement, with seconds on both sides (Prism, eqs. 3 and 4).

The paper adds seconds (eq. 3) to a sum of frequencies (eq. 2). Here both are seconds:
what the calls of the coming period would wait (`cost_s`), and how long blocks travel.
Only blocks that arrive cost time; dropping one is free.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.plan import ABSENT, Placement

SOURCES = ("host", "network")  # of blocks that arrive


@dataclasses.dataclass(frozen=True)
class Decision:
    """What comes of a candidate.

    Attributes:
      adopt: whether to migrate.
      current_s, candidate_s: waiting of the coming period under either placement.
      migration_s: sum of the transfers of all blocks that arrive (eq. 3).
      moves: how many blocks arrive.
    """

    adopt: bool
    current_s: float
    candidate_s: float
    migration_s: float
    moves: int


def arrivals(current: Placement, candidate: Placement) -> np.ndarray:
    """int64 [X, 4]: server, GPU, layer and block of every block that arrives."""
    new_NLE = candidate.gpu_NLE
    index_3X = np.nonzero((new_NLE >= 0) & (new_NLE != current.gpu_NLE))
    server_X, layer_X, block_X = index_3X
    return np.stack([server_X, new_NLE[index_3X], layer_X, block_X], axis=1)


def migration_seconds(
    moves_X4: np.ndarray,
    cost_model: CostModel,
    current: Placement,
    source: str = "host",
) -> float:
    """Eq. 3: every arriving block on its own, no two at once.

    From "host" at the rate of its GPU's link to host memory; from "network" first from
    the server that holds it now and sends fastest.
    """
    total_s = 0.0
    for n, g in np.unique(moves_X4[:, :2], axis=0).tolist():
        mine = (moves_X4[:, :2] == (n, g)).all(axis=1)
        if source == "host":
            total_s += int(mine.sum()) * cost_model.load_s(n, g)
            continue
        layer_X, block_X = moves_X4[mine, 2:].T
        holds_MX = current.on_NLE[:, layer_X, block_X]
        from_M = [cost_model.move_s(m, n, g) for m in range(len(holds_MX))]
        seconds_MX = np.where(holds_MX, np.array(from_M)[:, None], np.inf)
        total_s += float(seconds_MX.min(axis=0).sum())
    return total_s


def remote_seconds(
    placement: Placement, calls_NLE: np.ndarray, remote_s_NM: np.ndarray
) -> float:
    """Eq. 2 in seconds: calls that leave their server, each to its nearest copy.

    Each is a message of its own, as the paper counts; blocks that share one take less.

    `remote_s_NM`: seconds of a call from server N to M. Every block must be somewhere.
    """
    held_MX = placement.on_NLE.reshape(len(remote_s_NM), -1)
    total = 0.0
    for server, (calls_X, held_X) in enumerate(
        zip(calls_NLE.reshape(held_MX.shape), held_MX, strict=True)
    ):
        away = np.flatnonzero(~held_X & (calls_X > 0))
        seconds_MX = np.where(held_MX[:, away], remote_s_NM[server][:, None], np.inf)
        total += float((calls_X[away] * seconds_MX.min(axis=0)).sum())
    return total


def remote_call_seconds(cost_model: CostModel, tokens: float = 1.0) -> np.ndarray:
    """float64 [N, M]: a call of `tokens` tokens from N to M's fastest GPU; 0 on N."""
    compute_M = [
        min(cost_model.compute_s(m, g, tokens) for g in range(len(server.gpus)))
        for m, server in enumerate(cost_model.cluster.servers)
    ]
    send_NM = cost_model.sends_s(tokens)
    seconds_NM = send_NM + np.array(compute_M) + send_NM.T + cost_model.software_s()
    np.fill_diagonal(seconds_NM, 0.0)
    return seconds_NM


def decide(
    current: Placement,
    candidate: Placement,
    cost_s: Callable[[Placement], float],
    cost_model: CostModel,
    hysteresis: float = 0.05,
    source: str = "host",
) -> Decision:
    """Eq. 4 in seconds: adopt iff C(P') + T_mig < (1 - hysteresis) C(P).

    Args:
      current, candidate: placements P and P'.
      cost_s: seconds that the calls of the coming period wait under a placement.
      hysteresis: share of C(P) that must be won on top, 0 to 1, so that noise in the
        statistics moves nothing; 0 is the paper's rule.
      source: where arriving blocks come from, one of SOURCES.
    """
    moves_X4 = arrivals(current, candidate)
    current_s, candidate_s = cost_s(current), cost_s(candidate)
    migration_s = migration_seconds(moves_X4, cost_model, current, source)
    adopt = candidate_s + migration_s < (1 - hysteresis) * current_s
    return Decision(adopt, current_s, candidate_s, migration_s, len(moves_X4))


def settle(
    current: Placement, candidate: Placement, slots: Sequence[np.ndarray]
) -> Placement:
    """The candidate's choice per server, moving only blocks new to their server.

    Blocks stay on their GPU; a new one takes the GPU with room that holds fewest of its
    layer for its size, as `pack.quotas` shares layers, so that layers stay spread
    over the GPUs. A tie takes the candidate's. No placement with this choice moves
    fewer.
    """
    held_NLE = candidate.on_NLE
    gpu_NLE = np.where(held_NLE, current.gpu_NLE, ABSENT).astype(np.int8)
    new_NLE = held_NLE & (gpu_NLE == ABSENT)
    for server, slots_G in enumerate(slots):
        gpu_LE, G = gpu_NLE[server], len(slots_G)  # a view
        used_LG = np.stack([(gpu_LE == g).sum(axis=1) for g in range(G)], axis=1)
        free_G = slots_G - used_LG.sum(axis=0)
        for layer, block in np.argwhere(new_NLE[server]):
            full_G = (used_LG[layer] + 1) / np.maximum(slots_G, 1)
            full_G = np.where(free_G > 0, full_G, np.inf)
            gpu, wanted = full_G.argmin(), candidate.gpu_NLE[server, layer, block]
            if full_G[wanted] == full_G[gpu]:
                gpu = wanted
            gpu_LE[layer, block] = gpu
            used_LG[layer, gpu] += 1
            free_G[gpu] -= 1
    return Placement(gpu_NLE)


class Move(NamedTuple):
    """A block on its way, and the server that it comes from: its own, if from host."""

    layer: int
    block: int
    server: int
    gpu: int
    source: int


def ordered_moves(
    current: Placement,
    candidate: Placement,
    cost_model: CostModel,
    calls_NLE: np.ndarray,
    source: str = "host",
) -> list[Move]:
    """All arrivals, most called first.

    From the "network" a block that its server lacks comes from the holder that has it
    there first, if every link carries one block after another in this order.
    """
    moves_X4 = arrivals(current, candidate)
    server_X, _, layer_X, block_X = moves_X4.T
    cluster, num_bytes = cost_model.cluster, cost_model.block.num_bytes
    free_s: dict[tuple[int, int], float] = {}  # of the links
    moves = []
    for x in np.argsort(-calls_NLE[server_X, layer_X, block_X], kind="stable"):
        server, gpu, layer, block = moves_X4[x].tolist()
        origin, held_N = server, current.on_NLE[:, layer, block]
        if source == "network" and not held_N[server]:
            ways = []
            for m in np.flatnonzero(held_N).tolist():
                way = (m, server if cluster.sharing == "pair" else -1)
                link, start_s = cluster.link(m, server), free_s.get(way, 0.0)
                sent_s = start_s + link.busy_s(num_bytes)
                ways.append((sent_s + link.latency_s, sent_s, start_s, way))
            _, sent_s, _, way = min(ways)
            origin, free_s[way] = way[0], sent_s
        moves.append(Move(layer, block, server, gpu, origin))
    return moves
