"""Migration while serving: the placement is judged anew each period.

Blocks travel through the same queues as calls: one copy at a time on each host link,
and over the network in chunks, so that calls get between them. A block serves from its
arrival on; what a server gives up stays until the last block of the migration is in
place (so it needs spare memory for what moves, and no call ever finds nobody).
"""

import dataclasses
from collections import deque

import numpy as np

from moe_edge.core.checks import ConfigError, check_known, check_positive
from moe_edge.place.migrate import (
    Decision,
    decide,
    remote_call_seconds,
    remote_seconds,
    settle,
)
from moe_edge.place.placer import Placer
from moe_edge.place.plan import Placement
from moe_edge.place.transfers import SOURCES, Transfer, schedule
from moe_edge.simulate.cluster_calls import StepCalls
from moe_edge.simulate.cluster_lines import MIGRATE
from moe_edge.simulate.cluster_loop import EXTRA, ClusterLoop

PERIOD, LANDED, SENDING = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class MigrationPolicy:
    """When and how placements change.

    Attributes:
      placer: finds candidates.
      period_s: between two decisions; Prism's is 5 minutes.
      keep: share of the statistics that stays after each period; 1 keeps all since
        the start, as Prism does (section IV-B), which reacts late to new data.
      hysteresis: see `place.migrate.decide`.
      source: where blocks come from (`place.transfers.SOURCES`); Prism's eq. 3 counts
        host links, so its servers have every block in host memory.
      chunk_bytes: of a block on the network, so that calls need not wait for all of it.
    """

    placer: Placer
    period_s: float = 300.0
    keep: float = 1.0
    hysteresis: float = 0.05
    source: str = "host"
    chunk_bytes: int = 2**20

    def __post_init__(self):
        check_positive("migration period_s", self.period_s)
        check_positive("chunk_bytes", self.chunk_bytes)
        check_known("source of blocks", self.source, SOURCES)
        if not 0 <= self.keep <= 1:
            raise ConfigError(f"keep must lie in [0, 1], got {self.keep}")


@dataclasses.dataclass
class Migration:
    """One decision and what became of it; `done_s` is None if nothing moved."""

    time_s: float
    decision: Decision
    done_s: float | None = None


class MigratingLoop(ClusterLoop):
    """A cluster whose placement follows what is asked.

    Attributes:
      placement: in force, or about to be once all has arrived.
      migrations: every decision.
    """

    def __init__(self, *args, policy: MigrationPolicy, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy = policy
        self.placement: Placement = args[1]
        self.migrations: list[Migration] = []
        block_bytes = self.cost_model.block.num_bytes
        self._slots = self.cost_model.cluster.slots(block_bytes)
        self._pairs_NX = np.zeros(self.counts_NX.shape)
        self._calls_NX = np.zeros(self.counts_NX.shape)
        self._seen_s = 0.0
        self._on_way = 0
        self._loads: dict[int, deque[Transfer]] = {}
        self._loading: dict[int, Transfer] = {}
        self._routes: list[tuple[int, int]] = []
        self._queues: list[deque[Transfer]] = []
        self._left: list[int] = []

    def start(self) -> None:
        super().start()
        self.heap.push(self.policy.period_s, EXTRA, 0, PERIOD)

    def count_calls(self, time_s: float, server: int, calls: StepCalls) -> None:
        super().count_calls(time_s, server, calls)
        self._pairs_NX[server, calls.cells] += calls.counts
        self._calls_NX[server, calls.cells] += 1

    def other(self, time_s: float, server: int, item: int) -> None:
        if item == PERIOD:
            self._judge(time_s)
        elif item == LANDED:
            self._landed(time_s, server)
        else:
            self._send(time_s, item - SENDING)

    def _judge(self, time_s: float) -> None:
        """A period is over: would another placement pay?"""
        if self.unfinished:
            self.heap.push(time_s + self.policy.period_s, EXTRA, 0, PERIOD)
        self._seen_s = self._seen_s * self.policy.keep + self.policy.period_s
        if self._on_way or not self.unfinished or not self._calls_NX.any():
            return
        candidate, decision, calls_NLE = self.propose()
        record = Migration(time_s, decision)
        self.migrations.append(record)
        if decision.adopt:
            moves = schedule(
                self.placement,
                candidate,
                self.cost_model,
                calls_NLE,
                self.policy.source,
            )
            self.placement = candidate
            self._begin(time_s, moves)
        self._pairs_NX *= self.policy.keep
        self._calls_NX *= self.policy.keep

    def propose(self) -> tuple[Placement, Decision, np.ndarray]:
        """The candidate, whether to take it, and the calls of a period to come.

        One call of every block is added to what was counted, so that a server that
        nobody asked yet has statistics too.
        """
        shape = self.placement.gpu_NLE.shape
        pairs_NLE = (self._pairs_NX + 1).reshape(shape)
        layers_pairs = pairs_NLE.sum(axis=(0, 2), keepdims=True)
        candidate = self.policy.placer.place(
            pairs_NLE / layers_pairs,
            self._slots,
            self.cost_model,
            self.placement,
        )
        candidate = settle(self.placement, candidate, self._slots)
        scale = self.policy.period_s / self._seen_s
        calls_NLE = (self._calls_NX * scale).reshape(shape)
        tokens = max(1.0, self._pairs_NX.sum() / max(self._calls_NX.sum(), 1.0))
        seconds_NM = remote_call_seconds(self.cost_model, tokens)
        decision = decide(
            self.placement,
            candidate,
            lambda placement: remote_seconds(placement, calls_NLE, seconds_NM),
            self.cost_model,
            self.policy.hysteresis,
        )
        return candidate, decision, calls_NLE

    # --- blocks on their way

    def _begin(self, time_s: float, moves: list[Transfer]) -> None:
        self._on_way = len(moves)
        if not moves:
            self._finish(time_s)
            return
        self._routes, self._queues, self._left = [], [], []
        for move in moves:
            if move.source == move.server:
                self._loads.setdefault(self._gpu(move), deque()).append(move)
                continue
            route = (move.source, move.server)
            if route not in self._routes:
                self._routes.append(route)
                self._queues.append(deque())
                self._left.append(self.cost_model.block.num_bytes)
            self._queues[self._routes.index(route)].append(move)
        for gpu in list(self._loads):
            self._load(time_s, gpu)
        for route in range(len(self._routes)):
            self._send(time_s, route)

    def _gpu(self, move: Transfer) -> int:
        return self.first_gpu[move.server] + move.gpu

    def _load(self, time_s: float, gpu: int) -> None:
        """The next block waiting for this GPU's host link, if it is idle."""
        if gpu in self._loading or not self._loads.get(gpu):
            return
        self._loading[gpu] = self._loads[gpu].popleft()
        num_bytes = self.cost_model.block.num_bytes
        there_s = self.lines.load(gpu, time_s, num_bytes, MIGRATE)
        self.heap.push(there_s, EXTRA, gpu, LANDED)

    def _send(self, time_s: float, route: int) -> None:
        """The next chunk of a route; or its block is there, then the next block."""
        n, m = self._routes[route]
        queue, block_bytes = self._queues[route], self.cost_model.block.num_bytes
        if self._left[route] == 0:
            move = queue.popleft()
            gpu = self._gpu(move)
            self._loads.setdefault(gpu, deque()).append(move)
            self._load(time_s, gpu)
            self._left[route] = block_bytes
        if not queue:
            return
        chunk = min(self.policy.chunk_bytes, self._left[route])
        self._left[route] -= chunk
        there_s = self.lines.send(n, m, time_s, chunk, MIGRATE)
        if self._left[route]:  # the line is free before the chunk is there
            there_s -= self.cost_model.cluster.link(n, m).latency_s
        self.heap.push(max(there_s, time_s), EXTRA, n, SENDING + route)

    def _landed(self, time_s: float, gpu: int) -> None:
        move = self._loading.pop(gpu)
        block = move.layer * self.pools.num_experts + move.block
        self.table.gpu_NX[move.server, block] = gpu
        self.table.update(np.array([block]))
        self.version += 1
        self._load(time_s, gpu)
        self._on_way -= 1
        if not self._on_way:
            self._finish(time_s)

    def _finish(self, time_s: float) -> None:
        """All is in place: what is no longer wanted goes."""
        self.migrations[-1].done_s = time_s
        self.table = self._table_of(self.placement)
        self.version += 1
