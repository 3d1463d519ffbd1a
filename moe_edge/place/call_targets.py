"""Whom a server asks for a block: one rule for the simulator and for real servers.

A block on the server itself is always computed there. Another one goes to the holder
that answers first, ties to the next holder after the caller in the ring of servers, so
that callers spread over equal replicas.
"""

import numpy as np

from moe_edge.core.checks import CapacityError, check_shape


def check_covered(held_NX: np.ndarray, block_X: np.ndarray | None = None) -> None:
    """Raises CapacityError for blocks that nobody holds.

    Args:
      held_NX: bool, which server holds which block.
      block_X: numbers of the blocks, for the message; None: from 0.
    """
    lost_X = ~held_NX.any(axis=0)
    if lost_X.any():
        first = int(lost_X.argmax())
        raise CapacityError(
            f"{lost_X.sum()} blocks are on no server, the first is number "
            f"{first if block_X is None else block_X[first]}: calls need a placement "
            "that covers every block"
        )


def nearest_holders(
    server: int, held_MX: np.ndarray, seconds_MX: np.ndarray
) -> np.ndarray:
    """int64 [X]: the server that one server asks for each block.

    Args:
      held_MX: bool; every block is on some server (`check_covered`).
      seconds_MX: until an idle holder answers a call of one token; read only where it
        holds the block.
    """
    ring_M = (server + np.arange(len(held_MX))) % len(held_MX)  # itself first
    held_MX = held_MX[ring_M]
    seconds_MX = np.where(held_MX, seconds_MX[ring_M], np.inf)
    seconds_MX[0, held_MX[0]] = -1.0
    return ring_M[seconds_MX.argmin(axis=0)]


def call_targets(
    held_NLE: np.ndarray,
    seconds_NM: np.ndarray | None = None,
    nobody: int | None = None,
) -> np.ndarray:
    """int16 [N, L, E]: the server that each server asks for each block.

    Args:
      held_NLE: bool, which server holds which block (`Placement.on_NLE`).
      seconds_NM: of an idle call of one token from N to M; None: all alike, so that
        only the ring decides.
      nobody: stands for the target of a block that nobody holds; None: refused.
    Raises:
      CapacityError: a block that nobody holds.
      ConfigError: seconds of another number of servers.
    """
    N = len(held_NLE)
    if seconds_NM is None:
        seconds_NM = np.zeros((N, N))
    check_shape("seconds_NM", seconds_NM, (N, N))
    held_NX = held_NLE.reshape(N, -1)
    if nobody is None:
        check_covered(held_NX)
    targets_NX = np.empty(held_NX.shape, np.int16)
    for n, seconds_M in enumerate(seconds_NM):
        seconds_MX = np.broadcast_to(seconds_M[:, None], held_NX.shape)
        targets_NX[n] = nearest_holders(n, held_NX, seconds_MX)
    if nobody is not None:
        targets_NX[:, ~held_NX.any(axis=0)] = nobody
    return targets_NX.reshape(held_NLE.shape)
