"""A change of the table as a machine of states: no server, clock or policy in it.

    at rest --bring--> coming --all arrived--> coming, ready to publish
    any     --publish--> open --all confirmed--> in force: at rest, or coming still

Blocks arrive in free slots; the table gets a new version; when all have confirmed it,
what left is dropped. A loss makes a version at any time; what is on its way goes on.
"""

import dataclasses
import enum
from collections.abc import Iterable

import numpy as np

from moe_edge.place.rounds import Arrival
from moe_edge.workload.cluster_run import TableChange

Cell = tuple[int, int, int]  # server, layer (of those with experts), block


class Phase(enum.Enum):
    """Where a change stands; `OPEN` also while blocks still come."""

    REST = "nothing is on its way"
    COMING = "blocks are on their way, or there and in no table yet"
    OPEN = "a version is not in force everywhere"


class TableMachine:
    """Who holds what, through all changes of a run.

    Attributes:
      held_NLE: bool, by the newest version (MoE layers only).
      version: of the table.
      changes: all versions after the first, once they were in force.
      moved: blocks that arrived.
      waited_for: servers that are to confirm the newest version.
    """

    def __init__(self, held_NLE: np.ndarray):
        self.held_NLE = held_NLE
        self.version, self.moved = 0, 0
        self.changes: list[TableChange] = []
        self.waited_for: set[int] = set()
        self._coming: dict[tuple[int, int], list[Arrival]] = {}  # by server and order
        self._orders = 0
        self._drops: list[Cell] = []  # once what comes is there
        self._leaving: list[Cell] = []  # in no table, but in their slots still
        self._moves: list[Arrival] = []  # there, but in no table yet
        self._gone: list[Cell] = []  # with their servers
        self._open: list[TableChange] = []  # versions that are not in force everywhere
        self._sent_s = 0.0  # since the run began, when what comes was asked for

    @property
    def phase(self) -> Phase:
        if self.waited_for:
            return Phase.OPEN
        return Phase.COMING if self._coming or self._moves else Phase.REST

    @property
    def is_coming(self) -> bool:
        """Whether a server has still to bring blocks."""
        return bool(self._coming)

    @property
    def unconfirmed(self) -> list[int]:
        """Servers that are waited for, whatever for."""
        return sorted(self.waited_for | {server for server, _ in self._coming})

    def bring(
        self, arrivals: Iterable[Arrival], drops: Iterable[Cell], at_s: float
    ) -> dict[int, list[Arrival]]:
        """Blocks set out; what may leave once they are there goes with them.

        Returns:
          by server, what it is to bring, by the order `order`.
        """
        if self._coming:
            raise RuntimeError(
                f"servers {self.unconfirmed} have still to bring blocks; a change "
                "begins when the one before it has come"
            )
        if not self._moves:
            self._sent_s = at_s
        self._drops = list(drops)
        self._orders += 1
        by_server: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            by_server.setdefault(arrival.server, []).append(arrival)
        for server, mine in by_server.items():
            self._coming[server, self._orders] = mine
        return by_server

    @property
    def order(self) -> int:
        """Number of the latest `bring`."""
        return self._orders

    def arrived(self, server: int, order: int, own: set[tuple[int, int]]) -> bool:
        """A server has what it was to bring; whether that was all that came.

        Args:
          own: (layer, block) that it read from its own checkpoint.
        """
        for arrival in self._coming.pop((server, order), ()):
            if (arrival.layer, arrival.block) in own:
                arrival = arrival._replace(source=server)
            self.held_NLE[server, arrival.layer, arrival.block] = True
            self._moves.append(arrival)
            self.moved += 1
        return not self._coming and bool(self._moves)

    def take_drops(self) -> list[Cell]:
        """What leaves with the version that follows."""
        drops, self._drops = self._drops, []
        return drops

    def forget_drops(self) -> None:
        """Nothing leaves: the change that it belonged to is given up."""
        self._drops = []

    def publish(self, alive: Iterable[int], drops: Iterable[Cell] = ()) -> None:
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
                begun_s=self._sent_s if self._moves else None,
            )
        )
        self._moves, self._gone, self.waited_for = [], [], set(alive)

    def confirmed(self, server: int, version: int) -> bool:
        """A server goes by a version; whether the newest is now in force everywhere."""
        if version != self.version or server not in self.waited_for:
            return False
        self.waited_for.discard(server)
        return not self.waited_for

    def in_force(self, t_s: float) -> list[Cell]:
        """Nobody asks for what left any more: returns it, to be dropped."""
        if self.waited_for:
            raise RuntimeError(
                f"servers {sorted(self.waited_for)} have not confirmed version "
                f"{self.version}; nothing may be dropped before"
            )
        self.changes += [dataclasses.replace(change, t_s=t_s) for change in self._open]
        leaving, self._open, self._leaving = self._leaving, [], []
        return leaving

    def lost(self, server: int) -> None:
        """A server is gone with what it held; copies that were about to leave stay:
        one may be the last now."""
        self.forget_drops()
        self._coming = {k: v for k, v in self._coming.items() if k[0] != server}
        staying = {tuple(cell) for cell in self._leaving if cell[0] != server}
        for cell in staying:
            self.held_NLE[cell] = True
        self._open = [
            dataclasses.replace(
                change, drops=[c for c in change.drops if tuple(c) not in staying]
            )
            for change in self._open
        ]
        self._leaving = []
        held_LE = self.held_NLE[server]
        self._gone += [(server, *cell) for cell in np.argwhere(held_LE).tolist()]
        self.held_NLE[server] = False
