"""The table of who holds what, as the scheduler keeps it: migration and losses.

A change goes in steps that all servers see in the same order: blocks arrive in free
slots; the table gets a new version; when all have confirmed it, what left is dropped.
"""

import time
from typing import TYPE_CHECKING

import numpy as np

from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.call_targets import call_targets
from moe_edge.place.migration_policy import Ledger, MigrationPolicy
from moe_edge.place.plan import Placement
from moe_edge.place.rounds import Arrival, Round, next_round, recover
from moe_edge.workload.cluster_run import TableChange

if TYPE_CHECKING:
    from moe_edge.cluster.scheduler import Scheduler


class TableKeeper:
    """Versions of the table in one method's run.

    Attributes:
      held_NLE: bool, which server holds what (MoE layers only).
      version: of the table.
      changes: all versions after the first.
      decisions: of all periods.
      degraded: blocks that no server has a slot for.
      moved: blocks that arrived.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        held_NLE: np.ndarray,
        policy: MigrationPolicy | None,
        cost_model: CostModel | None,
    ):
        self._scheduler, self._policy, self._cost_model = scheduler, policy, cost_model
        self.start_NLE, self.held_NLE = held_NLE.copy(), held_NLE.copy()
        self.version, self.moved = 0, 0
        self.changes: list[TableChange] = []
        self.decisions: list[dict] = []
        self.degraded: list[tuple[int, int]] = []
        self._ledger = Ledger(held_NLE.shape)
        self._counted: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._seconds_N2: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._goal_NLE: np.ndarray | None = None
        self._round: Round | None = None
        self._rounds = 0
        # What servers are bringing, by server and number of the round; and what some
        # bring for a round that was given up.
        self._awaited: dict[tuple[int, int], list[Arrival]] = {}
        self._late: dict[tuple[int, int], list[Arrival]] = {}
        self._dropping: list[list[int]] = []  # not asked for in the newest table
        self._loaded: list[Arrival] = []  # lost blocks that have slots again
        self._to_load: list[Arrival] = []
        self._unconfirmed: set[int] = set()
        self._begun_s = self._due_s = self._sent_s = 0.0
        self._calls_NLE = np.zeros(held_NLE.shape)

    def begin(self, begun_s: float) -> None:
        """The run begins."""
        self._begun_s = begun_s
        if self._policy is not None:
            self._due_s = begun_s + self._policy.period_s

    @property
    def _busy(self) -> bool:
        return self._round is not None or bool(self._awaited) or bool(self._unconfirmed)

    def targets(self) -> np.ndarray:
        """int16 [N, L, E]: whom each server asks; of the dead anything."""
        held_NLE = self.held_NLE.copy()
        roomy_N = self._scheduler.alive_N & (self._scheduler.slots_N > 0)
        for layer, block in self.degraded:  # every server that can reads it itself
            held_NLE[roomy_N, layer, block] = True
        return call_targets(held_NLE)

    # Periods.

    def tick(self, busy: bool) -> None:
        """Looks whether a period is over."""
        policy = self._policy
        if policy is None or time.perf_counter() < self._due_s or not busy:
            return
        self._due_s += policy.period_s
        if self._busy or self._late or self.degraded:
            return
        self._count()
        self._ledger.seen_s += policy.period_s
        if not self._ledger.empty:
            self._judge()
        self._ledger.fade(policy.keep)

    def _count(self) -> None:
        """What servers have counted since the last time."""
        layers = self._scheduler.moe_layers
        for server in self._scheduler.alive:
            answer = self._scheduler.ask(server, "counts")
            if answer is None:
                continue
            arrays = answer[1]
            now = tuple(
                arrays[name][layers].reshape(-1) for name in ("pairs_LE", "calls_LE")
            )
            before = self._counted.get(server, (0, 0))
            self._ledger.add(server, now[0] - before[0], now[1] - before[1])
            self._counted[server] = now
            self._seconds_N2[server] = arrays["call_s_N"], arrays["blocks_N"]

    def seconds_NM(self) -> np.ndarray | None:
        """Measured seconds of a block that another server computes; None: too few."""
        N = len(self.held_NLE)
        call_s, blocks = np.zeros((N, N)), np.zeros((N, N))
        for server, (seconds_N, blocks_N) in self._seconds_N2.items():
            call_s[server], blocks[server] = seconds_N, blocks_N
        if not blocks.any():
            return None
        mean_s = call_s.sum() / blocks.sum()
        seconds = np.full((N, N), mean_s)
        np.divide(call_s, blocks, out=seconds, where=blocks > 0)
        np.fill_diagonal(seconds, 0.0)
        return seconds

    def _judge(self) -> None:
        scheduler = self._scheduler
        current = Placement(np.where(self.held_NLE, 0, -1))
        slots_N = np.where(scheduler.alive_N, scheduler.slots_N, 0)
        room = [np.array([n]) for n in placeable(slots_N).tolist()]
        where = self._ledger, current, room, self._cost_model, self.seconds_NM()
        proposal = self._policy.propose(*where)
        decision = proposal.decision
        self.decisions.append(
            {"t_s": time.perf_counter() - self._begun_s, **vars(decision)}
        )
        if decision.adopt:
            self._goal_NLE = proposal.candidate.on_NLE
            self._calls_NLE = proposal.calls_NLE
            self._next_round()

    # Rounds.

    def _next_round(self) -> None:
        scheduler = self._scheduler
        self._round = next_round(
            self.held_NLE,
            self._goal_NLE,
            scheduler.slots_N,
            self._calls_NLE,
            source=self._policy.source,
        )
        if self._round is None:
            self._goal_NLE = None
            return
        self._sent_s = time.perf_counter()
        self._bring(self._round.arrivals)
        if not self._awaited:
            self._publish()

    def _bring(self, arrivals: list[Arrival]) -> None:
        self._rounds += 1
        layers, by_server = self._scheduler.moe_layers, {}
        for arrival in arrivals:
            by_server.setdefault(arrival.server, []).append(arrival)
        for server, mine in by_server.items():
            cells = [(layers[a.layer], a.block, _source(a)) for a in mine]
            self._awaited[server, self._rounds] = mine
            arrays = {"cells": np.array(cells, np.int32)}
            self._scheduler.tell(server, "bring", {"round": self._rounds}, arrays)

    def arrived(self, server: int, fields: dict) -> None:
        """A server has what it was to bring, or most of it."""
        key = server, fields["round"]
        mine = self._awaited.pop(key, None)
        late = mine is None
        layers, lacking = self._scheduler.moe_layers, set(map(tuple, fields["lacking"]))
        for arrival in self._late.pop(key, []) if late else mine:
            if (layers[arrival.layer], arrival.block) not in lacking:
                self.held_NLE[server, arrival.layer, arrival.block] = True
                self.moved += 1
        if not late and not self._awaited:
            self._publish()

    def _publish(self, now: bool = False) -> None:
        """A new version; what leaves is in it no more, but in its slots still."""
        if self._round is not None:
            gone_NLE = np.zeros(self.held_NLE.shape, bool)
            for cell in self._round.drops:
                gone_NLE[cell] = True
            after_NLE = self.held_NLE & ~gone_NLE
            # A block that did not arrive may leave its last holder uncovered: it stays.
            lost_LE = ~after_NLE.any(axis=0) & self.held_NLE.any(axis=0)
            after_NLE |= self.held_NLE & lost_LE
            self._dropping += np.argwhere(self.held_NLE & ~after_NLE).tolist()
            self.held_NLE = after_NLE
        self.version += 1
        targets_NLE = self.targets()
        self._unconfirmed = set(self._scheduler.alive)
        for server in self._scheduler.alive:
            arrays = {"target_LE": self._scheduler.full(targets_NLE[server], server)}
            fields = {"version": self.version, "now": now}
            self._scheduler.tell(server, "table", fields, arrays)

    def confirmed(self, server: int, fields: dict) -> None:
        """A server goes by a version of the table."""
        if fields["version"] != self.version:
            return
        self._unconfirmed.discard(server)
        if not self._unconfirmed:
            self._in_force()

    def _in_force(self) -> None:
        layers, scheduler = self._scheduler.moe_layers, self._scheduler
        arrivals = self._round.arrivals if self._round is not None else self._loaded
        moves = [(a.server, layers[a.layer], a.block) for a in arrivals]
        drops = [(n, layers[layer], block) for n, layer, block in self._dropping]
        self.changes.append(
            TableChange(
                t_s=time.perf_counter() - self._begun_s,
                version=self.version,
                moves=moves,
                drops=drops,
                sources=[a.source for a in arrivals],
                begun_s=self._sent_s - self._begun_s if moves else None,
            )
        )
        for server in scheduler.alive:
            cells = [cell[1:] for cell in drops if cell[0] == server]
            if cells:
                arrays = {"cells": np.array(cells, np.int32)}
                scheduler.tell(server, "drop", {"version": self.version}, arrays)
        self._loaded, self._dropping = [], []
        if self._round is not None and self._goal_NLE is not None:
            self._next_round()
        else:
            self._round = None
            self._load_lost()

    # Losses.

    def lost(self, server: int) -> None:
        """A server is gone: replicas take over at once, lost blocks are read."""
        scheduler = self._scheduler
        self._goal_NLE = self._round = None
        self._late |= {k: v for k, v in self._awaited.items() if k[0] != server}
        self._awaited.clear()
        spare_N = np.where(scheduler.alive_N, scheduler.slots_N, 0)
        for arrivals in self._late.values():  # on their way: their slots are taken
            for arrival in arrivals:
                spare_N[arrival.server] -= 1
        calls_NLE = self._ledger.calls_NX.reshape(self.held_NLE.shape)
        # One slot stays free for blocks that are read for a call.
        plan = recover(
            self.held_NLE, scheduler.alive_N, np.maximum(spare_N - 1, 0), calls_NLE
        )
        self.held_NLE = plan.held_NLE
        self.degraded = sorted(set(plan.lost))
        self._to_load = plan.loads
        self._sent_s = time.perf_counter()
        self._publish(now=True)

    def repeat(self) -> None:
        """A new version of the same table: whoever waits asks again."""
        self._publish(now=True)

    def _load_lost(self) -> None:
        """The new table is in force: lost blocks get slots, as far as there are any."""
        if not self._to_load:
            return
        loads, self._to_load = self._to_load, []
        self._loaded = loads
        self.degraded = sorted(set(self.degraded) - {(a.layer, a.block) for a in loads})
        self._bring(loads)

    def settle(self) -> None:
        """The last request has ended: nothing new begins."""
        self._goal_NLE = None


def placeable(slots_N: np.ndarray) -> np.ndarray:
    """Blocks that a placement may use: one slot of each server stays free."""
    return np.maximum(slots_N - 1, 0)


def _source(arrival: Arrival) -> int:
    """Where a server gets a block from: another server, or its checkpoint."""
    return -1 if arrival.source == arrival.server else arrival.source
