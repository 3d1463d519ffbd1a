"""The table of who holds what, as the scheduler keeps it: migration and losses.

A change goes in steps that all servers see in the same order: blocks arrive in free
slots; the table gets a new version; when all have confirmed it, what left is dropped.
A loss, or a call that must be made again, makes a version at any time; whatever is on
its way goes on. One slot of each server is left out of all this: blocks that nobody has
are read into it for each call, also in the midst of a change. So are blocks that a
server reaches at none of their holders (`routes.py`).
"""

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from moe_edge.cluster.prism.judge import Judge
from moe_edge.cluster.prism.routes import Router
from moe_edge.cluster.scheduler.requests import NobodyLeft
from moe_edge.cluster.scheduler.serving import Holders
from moe_edge.place.rounds import Arrival, next_round, recover
from moe_edge.workload.cluster_run import TableChange

if TYPE_CHECKING:
    from moe_edge.cluster.prism.method import PrismScheduler

Cell = tuple[int, int, int]  # server, layer (of those with experts), block


class TableKeeper(Holders):
    """Versions of the table in one method's run.

    Attributes:
      start_NLE: bool, what servers hold at first (MoE layers only): what was asked for,
        and what of it servers that are lost already would have held, where there is
        room.
      held_NLE: likewise, by the newest table.
      version: of the table.
      changes: all versions after the first, once they were in force.
      moved: blocks that arrived.
    """

    def __init__(self, scheduler: "PrismScheduler", held_NLE: np.ndarray, judge: Judge):
        self._scheduler, self._judge = scheduler, judge
        self._router = Router(scheduler)
        self._coming: dict[tuple[int, int], list[Arrival]] = {}  # by server and order
        self._orders = 0
        self._drops: list[Cell] = []  # once what comes is there
        self._leaving: list[Cell] = []  # in no table, but in their slots still
        self._moves: list[Arrival] = []  # there, but in no table yet
        self._gone: list[Cell] = []  # with their servers
        self._open: list[TableChange] = []  # versions that are not in force everywhere
        self._unconfirmed: set[int] = set()
        self._goal_NLE: np.ndarray | None = None
        self._calls_NLE = np.zeros(held_NLE.shape)
        self.version, self.moved, self._ended = 0, 0, False
        self.changes: list[TableChange] = []
        self._begun_s = self._sent_s = 0.0
        alive_N = scheduler.alive_N
        plan = recover(held_NLE, alive_N, self._room_N(), self._calls_NLE)
        self.held_NLE = plan.loaded_NLE
        self.start_NLE = self.held_NLE.copy()
        self.actions = {"arrived": self.arrived, "confirmed": self.confirmed}

    def begin(self, begun_s: float) -> None:
        self._begun_s = begun_s
        self._judge.begin(begun_s)

    @property
    def degraded(self) -> list[tuple[int, int]]:
        """Blocks (layer, block) that no server holds: they are read for each call."""
        return [tuple(cell) for cell in np.argwhere(~self.held_NLE.any(axis=0))]

    @property
    def under_way(self) -> bool:
        """Whether blocks are coming, or a table is not in force everywhere."""
        return bool(self._coming) or bool(self._unconfirmed)

    @property
    def unconfirmed(self) -> list[int]:
        """Servers that are waited for."""
        return sorted(self._unconfirmed | {server for server, _ in self._coming})

    # Room.

    def _room_N(self) -> np.ndarray:
        """Slots for what is held, on its way or about to leave; one more is free."""
        scheduler = self._scheduler
        return placeable(np.where(scheduler.alive_N, scheduler.slots_N, 0))

    def tables(self) -> dict[int, dict[str, np.ndarray]]:
        """Living server -> the arrays of its table."""
        return self._router.tables(self.held_NLE)

    # Steps of a change.

    def tick(self, busy: bool) -> None:
        """Looks whether a period is over."""
        if not busy or not self._judge.is_due():
            return
        if self.under_way or self._goal_NLE is not None or self.degraded:
            return
        if self._scheduler.accusations.bad:
            return  # the policy knows nothing of servers that do not reach each other
        room_N = placeable(self._room_N())  # a slot for what is on its way
        proposal = self._judge.propose(self.held_NLE, room_N)
        if proposal is not None and proposal.decision.adopt:
            self._goal_NLE = proposal.candidate.on_NLE
            self._calls_NLE = proposal.calls_NLE
            self._go_on()

    def _go_on(self) -> None:
        """Begins what is to be done next; nothing is under way."""
        if self._ended:
            return
        if self._router.lacks(self.held_NLE):
            self._mend()
        elif self._goal_NLE is not None:
            self._next_round()

    def _next_round(self) -> None:
        where = self.held_NLE, self._goal_NLE, self._room_N(), self._calls_NLE
        planned = next_round(*where, source=self._judge.source)
        if planned is None:
            self._goal_NLE = None
            return
        self._drops = planned.drops
        self._bring(planned.arrivals)
        if not self._coming:
            self._end_round()

    def _mend(self) -> None:
        """Blocks that nobody holds, or that someone cannot reach, get the slots that
        are left; what finds none is read for each call."""
        where = self.held_NLE, self._room_N(), self._judge.calls_NLE
        if loads := self._router.loads(*where):
            self._bring(loads)

    def _bring(self, arrivals: Iterable[Arrival]) -> None:
        layers, by_server = self._scheduler.moe_layers, {}
        if not self._moves:
            self._sent_s = time.perf_counter()
        self._orders += 1
        for arrival in arrivals:
            by_server.setdefault(arrival.server, []).append(arrival)
        for server, mine in by_server.items():
            cells = [(layers[a.layer], a.block, _source(a)) for a in mine]
            self._coming[server, self._orders] = mine
            arrays = {"cells": np.array(cells, np.int32)}
            self._scheduler.tell(server, "bring", {"order": self._orders}, arrays)

    def arrived(self, server: int, fields: dict, _: float) -> None:
        """A server has what it was to bring."""
        layers, own = self._scheduler.moe_layers, set(map(tuple, fields["own"]))
        for arrival in self._coming.pop((server, fields["order"]), ()):
            if (layers[arrival.layer], arrival.block) in own:
                arrival = arrival._replace(source=server)
            self.held_NLE[server, arrival.layer, arrival.block] = True
            self._moves.append(arrival)
            self.moved += 1
        if not self._coming and self._moves:
            self._end_round()

    def _end_round(self) -> None:
        """All has come; what may leave does."""
        drops, self._drops = self._drops, []
        self._publish(drops)

    def _publish(self, drops: Iterable[Cell] = ()) -> None:
        """A new version; what leaves is in it no more, but in its slots still."""
        for cell in drops:
            self.held_NLE[cell] = False
            self._leaving.append(cell)
        self.version += 1
        self._open.append(
            TableChange(
                t_s=0.0,
                version=self.version,
                moves=[(a.server, a.layer, a.block) for a in self._moves],
                drops=[*drops, *self._gone],
                sources=[a.source for a in self._moves],
                begun_s=self._sent_s - self._begun_s if self._moves else None,
            )
        )
        self._moves, self._gone = [], []
        self._unconfirmed = set(self._scheduler.alive)
        for server, arrays in self.tables().items():
            self._scheduler.tell(server, "table", {"version": self.version}, arrays)

    def confirmed(self, server: int, fields: dict, at_s: float) -> None:
        """A server goes by a version of the table."""
        if fields["version"] == self.version and server in self._unconfirmed:
            self._unconfirmed.discard(server)
            if not self._unconfirmed:
                self._in_force(at_s)

    def _in_force(self, at_s: float) -> None:
        """Nobody asks for what left any more."""
        scheduler, t_s = self._scheduler, at_s - self._begun_s
        self.changes += [dataclasses.replace(change, t_s=t_s) for change in self._open]
        for server in scheduler.alive:
            cells = [
                (scheduler.moe_layers[layer], block)
                for n, layer, block in self._leaving
                if n == server
            ]
            if cells:
                arrays = {"cells": np.array(cells, np.int32)}
                scheduler.tell(server, "drop", {"version": self.version}, arrays)
        self._open, self._leaving = [], []
        if not self._coming:
            self._go_on()

    def repeat(self) -> None:
        """A new version of the same table: whoever waits asks again."""
        self._publish()

    def apart(self, by: int, who: int) -> None:
        """A server cannot reach another one: it asks others from now on.

        Raises:
          NobodyLeft: it reaches nobody that can compute a block.
        """
        self._goal_NLE, self._drops = None, []
        self._publish()

    def lost(self, server: int) -> None:
        """A server is gone: replicas take over at once, lost blocks are read again.

        Raises:
          NobodyLeft: no server that is left has a slot.
        """
        self._goal_NLE, self._drops = None, []
        self._judge.forget(server)
        self._coming = {k: v for k, v in self._coming.items() if k[0] != server}
        self._stay(server)
        self._gone += [
            (server, *c) for c in np.argwhere(self.held_NLE[server]).tolist()
        ]
        self.held_NLE[server] = False
        scheduler = self._scheduler
        if self.degraded and not scheduler.slots_N[scheduler.alive_N].any():
            raise NobodyLeft(
                f"servers {scheduler.alive} are left and have no slots; no server can "
                "compute an expert"
            )
        self._publish()

    def back(self, server: int) -> bool:
        """A lost server may return with nothing: it learns the table."""
        arrays = self._router.table(self._router.routes(self.held_NLE, server), server)
        arrays["held_LE"] = self._scheduler.full(self.held_NLE[server])
        self._scheduler.returning.prepare(server, {"version": self.version}, arrays)
        return True

    def returned(self, server: int) -> None:
        """It is asked from the next table on, and its slots are free."""
        self._publish()

    def _stay(self, lost: int) -> None:
        """Copies that were about to leave stay: one may be the last now."""
        staying = {tuple(cell) for cell in self._leaving if cell[0] != lost}
        for cell in staying:
            self.held_NLE[cell] = True
        self._open = [
            dataclasses.replace(
                change, drops=[c for c in change.drops if tuple(c) not in staying]
            )
            for change in self._open
        ]
        self._leaving = []

    def settle(self) -> None:
        self._goal_NLE, self._ended = None, True


def placeable(slots_N: np.ndarray) -> np.ndarray:
    """Blocks that a placement may use: one slot of each server stays free."""
    return np.maximum(slots_N - 1, 0)


def _source(arrival: Arrival) -> int:
    """Where a server gets a block from: another server, or its checkpoint."""
    return -1 if arrival.source == arrival.server else arrival.source
