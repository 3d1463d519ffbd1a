"""A migration in rounds, within every server's memory and with every block somewhere.

In a round copies arrive in free slots; then the table of targets gets a new version;
then copies that leave are dropped, of every block all but one of its last copies. So at
every instant every block is held, and slots are never exceeded.

It always ends if each server has a slot more than the candidate fills. Say that it
stalls: copies are still to arrive, P in all, at |Q| servers, and all of these are full.
A full server with p copies to come has at least p + 1 that leave, since the candidate
leaves it a slot; so P + |Q| copies or more leave. None could be dropped, so each is the
last one of its block, and the blocks differ. But the candidate covers every block, so
each of these is among the P copies to come: P >= P + |Q|, a contradiction.
"""

from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import CapacityError, check_known, check_shape
from moe_edge.place.call_targets import check_covered
from moe_edge.place.migrate import SOURCES


class Arrival(NamedTuple):
    """A copy to come; `source` sends it, the server itself loads it from its own
    checkpoint."""

    server: int
    layer: int
    block: int
    source: int


class Round(NamedTuple):
    """What happens next.

    Attributes:
      arrivals: at most as many a server as it has free slots.
      drops: (server, layer, block) of copies that go once the table without them is in
        force everywhere.
      held_NLE: bool, the new table: with the arrivals, without the drops.
    """

    arrivals: list[Arrival]
    drops: list[tuple[int, int, int]]
    held_NLE: np.ndarray


def next_round(
    held_NLE: np.ndarray,
    candidate_NLE: np.ndarray,
    slots_N: np.ndarray,
    calls_NLE: np.ndarray,
    *,
    source: str = "host",
    most: int | None = None,
) -> Round | None:
    """The next round on the way from a table to a candidate; None at the end.

    A copy that lets others leave (no holder that stays has its block yet) comes before
    one that does not, then the more called one of its server.

    Args:
      held_NLE: bool, who holds what now; it may be any table, also in the midst of
        another migration.
      candidate_NLE: bool, who shall hold what; covers every block and leaves each
        server that has to change at least one slot free.
      slots_N: int, blocks that a server can hold at any time, spare ones included.
      calls_NLE: how often each server calls a block.
      source: one of SOURCES: from the own checkpoint, or from a holder, by turns.
      most: arrivals at a server in a round; None: as many as have room.
    Raises:
      CapacityError: more blocks than slots, no spare slot, or a block on no server of
        the candidate.
    """
    check_known("source of blocks", source, SOURCES)
    for name, array in (("candidate_NLE", candidate_NLE), ("calls_NLE", calls_NLE)):
        check_shape(name, array, held_NLE.shape)
    N, _, E = held_NLE.shape
    check_shape("slots_N", slots_N, (N,))
    held_NX, wanted_NX = (a.reshape(N, -1) for a in (held_NLE, candidate_NLE))
    check_covered(wanted_NX)
    pending_NX, leaving_NX = wanted_NX & ~held_NX, held_NX & ~wanted_NX
    _check_room(held_NX, wanted_NX, pending_NX, slots_N)
    if not pending_NX.any() and not leaving_NX.any():
        return None
    calls_NX = calls_NLE.reshape(N, -1)
    free_N = slots_N - held_NX.sum(axis=1)
    locked_X = ~(held_NX & wanted_NX).any(axis=0)
    after_NX, sends_N = held_NX.copy(), np.zeros(N, np.int64)
    arrivals = []
    for server in range(N):
        room = free_N[server] if most is None else min(free_N[server], most)
        blocks = np.flatnonzero(pending_NX[server])
        order = np.lexsort((-calls_NX[server, blocks], ~locked_X[blocks]))[:room]
        for x in blocks[order].tolist():
            origin = server
            if source == "network" and (holders := np.flatnonzero(held_NX[:, x])).size:
                origin = int(holders[sends_N[holders].argmin()])
                sends_N[origin] += 1
            arrivals.append(Arrival(server, x // E, x % E, origin))
            after_NX[server, x] = True
    gone_NX = _dropped(after_NX, wanted_NX, slots_N)
    drops = [(n, x // E, x % E) for n, x in np.argwhere(gone_NX).tolist()]
    return Round(arrivals, drops, (after_NX & ~gone_NX).reshape(held_NLE.shape))


def _check_room(held_NX, wanted_NX, pending_NX, slots_N) -> None:
    used_N, then_N = held_NX.sum(axis=1), wanted_NX.sum(axis=1)
    for server, slots in enumerate(slots_N.tolist()):
        if used_N[server] > slots:
            raise CapacityError(
                f"server {server} holds {used_N[server]} blocks in {slots} slots"
            )
        if pending_NX[server].any() and then_N[server] >= slots:
            raise CapacityError(
                f"server {server} is to hold {then_N[server]} blocks in {slots} slots; "
                "migrating needs a spare one"
            )


def _dropped(held_NX, wanted_NX, slots_N) -> np.ndarray:
    """bool [N, X]: copies that leave and are not the last of their block.

    Where only leaving copies are left, that of the server with most room stays.
    """
    leaving_NX = held_NX & ~wanted_NX
    stays_X = (held_NX & wanted_NX).any(axis=0)
    spare_N = slots_N - held_NX.sum(axis=1) - (wanted_NX & ~held_NX).sum(axis=1)
    worth_NX = np.where(leaving_NX, spare_N[:, None], np.iinfo(np.int64).min)
    last_X = worth_NX.argmax(axis=0)
    gone_NX = leaving_NX.copy()
    only_X = np.flatnonzero(leaving_NX.any(axis=0) & ~stays_X)
    gone_NX[last_X[only_X], only_X] = False
    return gone_NX


class Recovery(NamedTuple):
    """What becomes of a table when servers die.

    Attributes:
      held_NLE: bool, the survivors' copies.
      lost: (layer, block) that no survivor holds.
      loads: of lost blocks, each by its new holder from its own checkpoint, most called
        first.
      on_demand: (layer, block) that found no free slot: each caller must load it when
        it is called.
    """

    held_NLE: np.ndarray
    lost: list[tuple[int, int]]
    loads: list[Arrival]
    on_demand: list[tuple[int, int]]

    @property
    def loaded_NLE(self) -> np.ndarray:
        """bool: the table once all loads are done; `on_demand` is nowhere."""
        held_NLE = self.held_NLE.copy()
        for server, layer, block, _ in self.loads:
            held_NLE[server, layer, block] = True
        return held_NLE


def recover(
    held_NLE: np.ndarray, alive_N: np.ndarray, slots_N: np.ndarray, calls_NLE
) -> Recovery:
    """Shares lost blocks out among the survivors' free slots, evenly by calls.

    Args:
      held_NLE: bool, who held what.
      alive_N: bool, who is left.
      slots_N: int, blocks that a server can hold.
      calls_NLE: how often each server called a block; the dead ones' requests go on
        elsewhere, so theirs count too.
    """
    N, _, E = held_NLE.shape
    check_shape("alive_N", alive_N, (N,))
    check_shape("slots_N", slots_N, (N,))
    check_shape("calls_NLE", calls_NLE, held_NLE.shape)
    left_NLE = held_NLE & alive_N[:, None, None]
    lost_X = np.flatnonzero(~left_NLE.reshape(N, -1).any(axis=0))
    calls_X = calls_NLE.reshape(N, -1).sum(axis=0)[lost_X]
    free_N = np.where(alive_N, slots_N - left_NLE.sum(axis=(1, 2)), 0)
    load_N = np.zeros(N)
    loads, on_demand = [], []
    for place in np.argsort(-calls_X, kind="stable").tolist():
        layer, block = divmod(int(lost_X[place]), E)
        if not (free_N > 0).any():
            on_demand.append((layer, block))
            continue
        server = int(np.where(free_N > 0, load_N, np.inf).argmin())
        free_N[server] -= 1
        load_N[server] += 1 + calls_X[place]
        loads.append(Arrival(server, layer, block, server))
    lost = [divmod(x, E) for x in lost_X.tolist()]
    return Recovery(left_NLE, lost, loads, on_demand)
