"""Whether to change a placement, with seconds on both sides (Prism, eqs. 3 and 4).

The paper adds seconds (eq. 3) to a sum of frequencies (eq. 2). Here both are seconds:
what the calls of the coming period would wait (`cost_s`), and how long blocks travel.
Only blocks that arrive cost time; dropping one is free.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.plan import ABSENT, Placement


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


def migration_seconds(moves_X4: np.ndarray, cost_model: CostModel) -> float:
    """Eq. 3: every arriving block at the rate of its GPU's link to host memory."""
    pairs, counts = np.unique(moves_X4[:, :2], axis=0, return_counts=True)
    each = [cost_model.load_s(int(n), int(g)) for n, g in pairs]
    return float(np.dot(counts, each)) if len(pairs) else 0.0


def remote_seconds(
    placement: Placement, calls_NLE: np.ndarray, remote_s_NM: np.ndarray
) -> float:
    """Eq. 2 in seconds: calls that leave their server, each to its nearest copy.

    Args:
      placement: one that covers every block.
      calls_NLE: calls of the period.
      remote_s_NM: seconds of a call from server N to server M.
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
    cluster = cost_model.cluster
    N = cluster.num_servers
    seconds_NM = np.zeros((N, N))
    for m, server in enumerate(cluster.servers):
        compute_s = min(
            cost_model.compute_s(m, g, tokens) for g in range(len(server.gpus))
        )
        for n in range(N):
            if n != m:
                there_s = cost_model.send_s(n, m, tokens)
                back_s = cost_model.send_s(m, n, tokens)
                seconds_NM[n, m] = there_s + compute_s + back_s
    return seconds_NM


def decide(
    current: Placement,
    candidate: Placement,
    cost_s: Callable[[Placement], float],
    cost_model: CostModel,
    hysteresis: float = 0.05,
) -> Decision:
    """Eq. 4 in seconds: adopt iff C(P') + T_mig < (1 - hysteresis) C(P).

    Args:
      current, candidate: placements P and P'.
      cost_s: seconds that the calls of the coming period wait under a placement
        (`remote_seconds`, or what a placer minimises).
      cost_model: what transfers cost.
      hysteresis: share of C(P) that must be won on top, 0 to 1, so that noise in the
        statistics moves nothing; 0 is the paper's rule.
    Raises:
      ConfigError: hysteresis out of range.
    """
    if not 0 <= hysteresis < 1:
        raise ConfigError(f"hysteresis is {hysteresis}, expected 0 or more, below 1")
    moves_X4 = arrivals(current, candidate)
    current_s, candidate_s = cost_s(current), cost_s(candidate)
    migration_s = migration_seconds(moves_X4, cost_model)
    adopt = candidate_s + migration_s < (1 - hysteresis) * current_s
    return Decision(adopt, current_s, candidate_s, migration_s, len(moves_X4))


def relabel(
    current: Placement,
    candidate: Placement,
    slots: Sequence[np.ndarray],
    speeds: Sequence[np.ndarray] | None = None,
) -> Placement:
    """The candidate with each server's GPUs renumbered so that fewest blocks move.

    Only GPUs of equal speed change places, and only where the blocks fit.

    Args:
      current, candidate: placements.
      slots, speeds: of every server's GPUs; all equally fast if None.
    """
    gpu_NLE = candidate.gpu_NLE.copy()
    for server, slots_G in enumerate(slots):
        G = len(slots_G)
        new_LE, old_LE = candidate.gpu_NLE[server], current.gpu_NLE[server]
        new_GX = (new_LE.ravel() == np.arange(G)[:, None]).astype(np.int64)
        old_GX = (old_LE.ravel() == np.arange(G)[:, None]).astype(np.int64)
        stay_GG = new_GX @ old_GX.T
        speed_G = np.ones(G) if speeds is None else np.asarray(speeds[server])
        fits_GG = new_GX.sum(axis=1)[:, None] <= slots_G
        fits_GG &= np.isclose(speed_G[:, None], speed_G)
        # A misfit costs more than all blocks: the identity always fits.
        worth_GG = np.where(fits_GG, stay_GG, -(new_LE.size + 1) * G)
        _, number_G = linear_sum_assignment(worth_GG, maximize=True)
        held_LE = new_LE >= 0
        gpu_NLE[server][held_LE] = number_G[new_LE[held_LE]]
    return Placement(gpu_NLE)


def settle(
    current: Placement, candidate: Placement, slots: Sequence[np.ndarray]
) -> Placement:
    """The candidate's choice per server, moving only blocks new to their server.

    Blocks stay on their GPU; a new one takes its candidate's GPU, or the one with most
    room. No placement with this choice moves fewer.
    """
    held_NLE = candidate.on_NLE
    gpu_NLE = np.where(held_NLE, current.gpu_NLE, ABSENT).astype(np.int8)
    new_NLE = held_NLE & (gpu_NLE == ABSENT)
    for server, slots_G in enumerate(slots):
        flat = gpu_NLE[server].ravel()  # a view
        free_G = slots_G - np.bincount(flat[flat >= 0], minlength=len(slots_G))
        wanted = candidate.gpu_NLE[server].ravel()
        for block in np.flatnonzero(new_NLE[server]):
            gpu = wanted[block] if free_G[wanted[block]] > 0 else free_G.argmax()
            flat[block] = gpu
            free_G[gpu] -= 1
    return Placement(gpu_NLE)
