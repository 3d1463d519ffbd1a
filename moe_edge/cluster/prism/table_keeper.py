"""The table of who holds what, as the scheduler keeps it: migration and losses.

A change goes in steps that all servers see in the same order (`table_change.py`); this
is what begins them, and what servers are told. A loss, or a call that must be made
again, makes a version at any time; whatever is on its way goes on. One slot of each
server is left out of all this: blocks that nobody has are read into it for each call,
also in the midst of a change. So are blocks that a server reaches at none of their
holders (`routes.py`).
"""

import time
from collections.abc import Iterable

import numpy as np

from moe_edge.cluster.prism.judge import Judge
from moe_edge.cluster.prism.port import Port
from moe_edge.cluster.prism.routes import (
    Routes,
    copies_for,
    out_of_reach,
    reaches,
    routes_of,
)
from moe_edge.cluster.prism.table_change import Cell, Phase, TableMachine
from moe_edge.cluster.scheduler.requests import NobodyLeft
from moe_edge.cluster.scheduler.serving import Holders
from moe_edge.place.rounds import Arrival, next_round, recover


class TableKeeper(Holders):
    """Versions of the table in one method's run.

    Attributes:
      table: versions and what is on its way.
      start_NLE: bool, what servers hold at first (MoE layers only): what was asked for,
        and what of it servers that are lost already would have held, where there is
        room.
    """

    def __init__(self, port: Port, held_NLE: np.ndarray, judge: Judge):
        self._port, self._judge = port, judge
        self._goal_NLE: np.ndarray | None = None
        self._calls_NLE = np.zeros(held_NLE.shape)
        self._ended, self._begun_s = False, 0.0
        plan = recover(held_NLE, port.alive_N, self._room_N(), self._calls_NLE)
        self.table = TableMachine(plan.loaded_NLE)
        self.start_NLE = self.held_NLE.copy()
        self.actions = {"arrived": self.arrived, "confirmed": self.confirmed}

    @property
    def held_NLE(self) -> np.ndarray:
        """bool, what servers hold by the newest table."""
        return self.table.held_NLE

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
        return self.table.is_coming or self.table.phase is Phase.OPEN

    @property
    def unconfirmed(self) -> list[int]:
        """Servers that are waited for."""
        return self.table.unconfirmed

    def _room_N(self) -> np.ndarray:
        """Slots for what is held, on its way or about to leave; one more is free."""
        port = self._port
        return placeable(np.where(port.alive_N, port.slots_N, 0))

    # Whom servers ask, by what is known of them now.

    @property
    def _reach_NM(self) -> np.ndarray:
        port = self._port
        return reaches(len(port.alive_N), port.accusations.bad)

    def _routes(self, alive_N: np.ndarray) -> Routes:
        """Raises NobodyLeft: a server finds nobody for a block."""
        slots_N = self._port.slots_N
        return routes_of(self.held_NLE, alive_N, slots_N, self._reach_NM)

    def _arrays(self, routes: Routes, server: int) -> dict[str, np.ndarray]:
        """A server's table."""
        return {
            "target_LE": self.full(routes.target_NLE[server], server),
            "read_LE": self.full(routes.read_NLE[server]),
        }

    def tables(self) -> dict[int, dict[str, np.ndarray]]:
        """Living server -> the arrays of its table."""
        routes = self._routes(self._port.alive_N)
        return {server: self._arrays(routes, server) for server in self._port.alive}

    def full(self, array_LE: np.ndarray, empty: int = 0) -> np.ndarray:
        """[MoE layers, E] -> [all layers, E]."""
        full = np.full(self._port.shape_LE, empty, array_LE.dtype)
        full[self._port.moe_layers] = array_LE
        return full

    # What begins a step.

    def tick(self, busy: bool) -> None:
        """Looks whether a period is over."""
        if not busy or not self._judge.is_due():
            return
        if self.under_way or self._goal_NLE is not None or self.degraded:
            return
        if self._port.accusations.bad:
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
        where = self._port.alive_N, self._reach_NM
        if self.degraded or out_of_reach(self.held_NLE, *where).any():
            self._mend()
        elif self._goal_NLE is not None:
            self._next_round()

    def _next_round(self) -> None:
        where = self.held_NLE, self._goal_NLE, self._room_N(), self._calls_NLE
        planned = next_round(*where, source=self._judge.source)
        if planned is None:
            self._goal_NLE = None
            return
        self._bring(planned.arrivals, planned.drops)
        if not self.table.is_coming:
            self._publish(self.table.take_drops())

    def _mend(self) -> None:
        """Blocks that nobody holds, or that someone cannot reach, get the slots that
        are left; what finds none is read for each call."""
        where = self._port.alive_N, self._room_N(), self._judge.calls_NLE
        found = recover(self.held_NLE, *where)
        copies = copies_for(found.loaded_NLE, *where, self._reach_NM)
        if loads := found.loads + copies:
            self._bring(loads)

    def _bring(self, arrivals: Iterable[Arrival], drops: Iterable[Cell] = ()) -> None:
        layers, at_s = self._port.moe_layers, time.perf_counter() - self._begun_s
        for server, mine in self.table.bring(arrivals, drops, at_s).items():
            cells = [(layers[a.layer], a.block, _source(a)) for a in mine]
            arrays = {"cells": np.array(cells, np.int32)}
            self._port.tell(server, "bring", {"order": self.table.order}, arrays)

    def _publish(self, drops: Iterable[Cell] = ()) -> None:
        self.table.publish(self._port.alive, drops)
        for server, arrays in self.tables().items():
            self._port.tell(server, "table", {"version": self.table.version}, arrays)

    # What servers say.

    def arrived(self, server: int, fields: dict, _: float) -> None:
        """A server has what it was to bring."""
        number = {layer: place for place, layer in enumerate(self._port.moe_layers)}
        own = {(number[layer], block) for layer, block in fields["own"]}
        if self.table.arrived(server, fields["order"], own):
            self._publish(self.table.take_drops())

    def confirmed(self, server: int, fields: dict, at_s: float) -> None:
        """A server goes by a version of the table."""
        if self.table.confirmed(server, fields["version"]):
            self._drop(self.table.in_force(at_s - self._begun_s))
            if not self.table.is_coming:
                self._go_on()

    def _drop(self, leaving: Iterable[Cell]) -> None:
        """Nobody asks for what left any more."""
        port = self._port
        for server in port.alive:
            cells = [
                (port.moe_layers[layer], block)
                for n, layer, block in leaving
                if n == server
            ]
            if cells:
                arrays = {"cells": np.array(cells, np.int32)}
                port.tell(server, "drop", {"version": self.table.version}, arrays)

    # What happens to servers.

    def repeat(self) -> None:
        """A new version of the same table: whoever waits asks again."""
        self._publish()

    def apart(self, by: int, who: int) -> None:
        """A server cannot reach another one: it asks others from now on.

        Raises:
          NobodyLeft: it reaches nobody that can compute a block.
        """
        self._goal_NLE = None
        self.table.forget_drops()
        self._publish()

    def lost(self, server: int) -> None:
        """A server is gone: replicas take over at once, lost blocks are read again.

        Raises:
          NobodyLeft: no server that is left has a slot.
        """
        self._goal_NLE = None
        self._judge.forget(server)
        self.table.lost(server)
        port = self._port
        if self.degraded and not port.slots_N[port.alive_N].any():
            raise NobodyLeft(
                f"servers {port.alive} are left and have no slots; no server can "
                "compute an expert"
            )
        self._publish()

    def back(self, server: int) -> bool:
        """A lost server may return with nothing: it learns the table."""
        port, alive_N = self._port, self._port.alive_N.copy()
        alive_N[server] = True
        arrays = self._arrays(self._routes(alive_N), server)
        arrays["held_LE"] = self.full(self.held_NLE[server])
        port.returning.prepare(server, {"version": self.table.version}, arrays)
        return True

    def returned(self, server: int) -> None:
        """It is asked from the next table on, and its slots are free."""
        self._publish()

    def settle(self) -> None:
        self._goal_NLE, self._ended = None, True


def placeable(slots_N: np.ndarray) -> np.ndarray:
    """Blocks that a placement may use: one slot of each server stays free."""
    return np.maximum(slots_N - 1, 0)


def _source(arrival: Arrival) -> int:
    """Where a server gets a block from: another server, or its checkpoint."""
    return -1 if arrival.source == arrival.server else arrival.source
