"""Whom each server asks for each block, where not every server reaches every other.

A block that a server reaches at no holder is read for each call: from the server's own
checkpoint, or, if it has no slot, by a server with a slot that it reaches. So it is for
blocks that nobody holds. Copies for such servers come into free slots (`copies_for`).
"""

from typing import NamedTuple

import numpy as np

from moe_edge.cluster.scheduler.requests import NobodyLeft
from moe_edge.place.call_targets import call_targets
from moe_edge.place.rounds import Arrival


class Routes(NamedTuple):
    """What servers go by; of the dead anything.

    Attributes:
      target_NLE: int16, the server that each server asks.
      read_NLE: bool, blocks that a server reads for each call.
    """

    target_NLE: np.ndarray
    read_NLE: np.ndarray


def reaches(servers: int, bad) -> np.ndarray:
    """bool [N, M]: whether server N reaches server M; `bad`: pairs that do not."""
    reach_NM = np.ones((servers, servers), bool)
    for by, who in bad:
        reach_NM[by, who] = False
    return reach_NM


def out_of_reach(held_NLE, alive_N, reach_NM) -> np.ndarray:
    """bool [N, L, E]: blocks of which a living server reaches none of the holders."""
    held_NX = held_NLE.reshape(len(held_NLE), -1)
    found_NX = reach_NM.astype(int) @ held_NX > 0
    away_NX = ~found_NX & held_NX.any(axis=0) & alive_N[:, None]
    return away_NX.reshape(held_NLE.shape)


def routes_of(
    held_NLE: np.ndarray, alive_N: np.ndarray, slots_N: np.ndarray, reach_NM
) -> Routes:
    """Routes of a table.

    Args:
      held_NLE: bool, who holds what; of the dead nothing.
      slots_N: of each server; one without any can read nothing.
    Raises:
      NobodyLeft: a server finds nobody for a block.
    """
    readers_N = alive_N & (slots_N > 0)
    nobody_LE = ~held_NLE.any(axis=0)
    away_NLE = out_of_reach(held_NLE, alive_N, reach_NM)
    read_NLE = readers_N[:, None, None] & (nobody_LE | away_NLE)
    without_N = alive_N & ~readers_N
    for server in np.flatnonzero(without_N).tolist():
        lacking_LE = away_NLE[server] | nobody_LE
        if lacking_LE.any():
            reader = _reader_for(server, readers_N, reach_NM, held_NLE, lacking_LE)
            read_NLE[reader] |= away_NLE[server]
    seconds_NM = np.where(reach_NM, 0.0, np.inf)
    holder_NLE = call_targets(held_NLE, seconds_NM, nobody=0)
    reader_NLE = call_targets(held_NLE | read_NLE, seconds_NM)
    by_reader_NLE = away_NLE | nobody_LE | read_NLE
    target_NLE = np.where(by_reader_NLE, reader_NLE, holder_NLE)
    return Routes(target_NLE, read_NLE | nobody_LE)


def _reader_for(server, readers_N, reach_NM, held_NLE, lacking_LE) -> int:
    """The next server in the ring that reads for one without slots."""
    ring = (server + np.arange(len(readers_N))) % len(readers_N)
    for reader in ring.tolist():
        if readers_N[reader] and reach_NM[server, reader]:
            return reader
    layer, block = np.argwhere(lacking_LE)[0].tolist()
    holders = np.flatnonzero(held_NLE[:, layer, block]).tolist()
    raise NobodyLeft(
        f"server {server} has no slots and reaches none of the servers "
        f"{np.flatnonzero(readers_N).tolist()} that have some (block {block} of MoE "
        f"layer {layer} is on servers {holders}); the run cannot continue: let them "
        "connect to each other"
    )


def copies_for(
    held_NLE: np.ndarray,
    alive_N: np.ndarray,
    room_N: np.ndarray,
    calls_NLE: np.ndarray,
    reach_NM: np.ndarray,
) -> list[Arrival]:
    """Copies of blocks that some server reaches at no holder, most called ones first.

    Each comes from its new holder's own checkpoint: to the server that lacks it if it
    has room, else to one that it reaches. What finds no room is read for each call.

    Args:
      room_N: blocks that each server may hold.
    """
    held_NLE, copies = held_NLE.copy(), []
    free_N = np.where(alive_N, room_N - held_NLE.sum(axis=(1, 2)), 0)
    lacking = np.argwhere(out_of_reach(held_NLE, alive_N, reach_NM)).tolist()
    for server, layer, block in sorted(lacking, key=lambda c: -calls_NLE[tuple(c)]):
        if (held_NLE[:, layer, block] & reach_NM[server]).any():
            continue  # by a copy for another server
        near_N = np.where(reach_NM[server], free_N, 0)
        holder = server if near_N[server] > 0 else int(near_N.argmax())
        if near_N[holder] > 0:
            free_N[holder] -= 1
            held_NLE[holder, layer, block] = True
            copies.append(Arrival(holder, layer, block, holder))
    return copies
