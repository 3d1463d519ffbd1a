"""Migration while serving: the placement is judged again each period.

Blocks travel through the same queues as calls: one copy at a time on each host link,
and over the network in chunks, so that calls get between them. A block serves from its
arrival on.

What a server gives up stays until its memory is needed: on a full GPU a block is copied
in only once one that leaves is dropped, which another server must hold by then, so that
every block always has at least one holder. Where every copy waits for another one (two
servers exchange blocks that no other server holds), one goes ahead in spare memory:
`peak_memory` says how much. A step that had begun calls what was dropped once more.
"""

import dataclasses
from collections import defaultdict, deque
from typing import Any

import numpy as np

from moe_edge.place.migrate import Decision, Move, ordered_moves
from moe_edge.place.migration_policy import Ledger, MigrationPolicy, Proposal
from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster.drive import LANDED, PERIOD, SENDING
from moe_edge.simulate.cluster.links import MIGRATE


@dataclasses.dataclass
class Judged:
    """One decision and what became of it; `done_s` is None if nothing moved."""

    time_s: float
    decision: Decision
    done_s: float | None = None


class Migration:
    """Lets the placement of a `loop.ClusterLoop` follow what is asked.

    Attributes:
      placement: in force, or about to be once all has arrived.
      ledger: what was counted.
      migrations: every decision.
      peak_memory: of the GPUs, the largest share of the placement's memory that was
        ever taken, blocks on their way over its host link included.
    """

    def __init__(self, loop, policy: MigrationPolicy, placement: Placement):
        self.loop, self.policy, self.placement = loop, policy, placement
        self.migrations: list[Judged] = []
        self.table, self.heap = loop.table, loop.heap
        self.cost_model, self._block_bytes = loop.cost_model, loop.block_bytes
        self._slots = self.cost_model.cluster.slots(self._block_bytes)
        if loop.memory is not None:
            self._slots = loop.memory.placed_slots
        self.ledger = Ledger(placement.gpu_NLE.shape)
        self._slots_G = np.concatenate(self._slots)
        self._used_G = self._held()
        self.peak_memory = self._memory()
        self._on_way = 0
        # Blocks to copy and the one being copied, of each GPU's host link.
        self._loads: dict[int, deque[Move]] = defaultdict(deque)
        self._loading: dict[int, Move] = {}
        # Blocks to send over the network, and bytes left of the first one, by route:
        # sender * servers + receiver.
        self._queues: dict[int, deque[Move]] = {}
        self._left: dict[int, int] = {}

    def start(self) -> None:
        """Pushes the first event."""
        handlers = {PERIOD: self._judge, LANDED: self._landed, SENDING: self._send}
        self.loop.handlers.update(handlers)
        self.heap.push(self.policy.period_s, PERIOD)

    def count(self, server: int, cells: np.ndarray, counts: np.ndarray) -> None:
        """Takes note of the blocks that a step asks for, and of their pairs."""
        self.ledger.count(server, cells, counts)

    def facts(self) -> dict[str, Any]:
        """What a report says of a run that migrated."""
        rows = [
            {"time_s": m.time_s, "done_s": m.done_s, **dataclasses.asdict(m.decision)}
            for m in self.migrations
        ]
        moved = [row for row in rows if row["adopt"]]
        return {
            "migrations": rows,
            "migrated": len(moved),
            "moved_blocks": sum(row["moves"] for row in moved),
            "peak_memory": self.peak_memory,
        }

    def _judge(self, time_s: float, *_) -> None:
        """A period is over: would another placement pay?"""
        unfinished = self.loop.unfinished
        if unfinished:
            self.heap.push(time_s + self.policy.period_s, PERIOD)
        self.ledger.seen_s += self.policy.period_s
        if unfinished and not self._on_way and not self.ledger.empty:
            candidate, decision, calls_NLE = self.propose()
            self.migrations.append(Judged(time_s, decision))
            if decision.adopt:
                before, self.placement = self.placement, candidate
                rule = (self.cost_model, calls_NLE, self.policy.source)
                self._begin(time_s, ordered_moves(before, candidate, *rule))
        self.ledger.fade(self.policy.keep)

    def propose(self) -> Proposal:
        """What the policy makes of what was counted so far."""
        memory = self.loop.memory
        return self.policy.propose(
            self.ledger,
            self.placement,
            self._slots,
            self.cost_model,
            None if memory is None else memory.lacking_seconds(),
        )

    # --- blocks on their way

    def _begin(self, time_s: float, moves: list[Move]) -> None:
        self._on_way = len(moves)
        if not moves:
            self._finish(time_s)
            return
        self._queues.clear()
        for move in moves:
            if move.source == move.server:
                self._loads[self._gpu(move)].append(move)
                continue
            route = move.source * len(self._slots) + move.server
            self._queues.setdefault(route, deque()).append(move)
        self._left = dict.fromkeys(self._queues, self._block_bytes)
        for route in self._queues:
            self._send(time_s, route)
        self._load_all(time_s)

    def _gpu(self, move: Move) -> int:
        return self.loop.first_gpu[move.server] + move.gpu

    def _load_all(self, time_s: float) -> None:
        """Copies that wait begin on idle host links with room behind them."""
        waiting = [gpu for gpu, queue in self._loads.items() if queue]
        for gpu in waiting:
            if gpu not in self._loading and self._make_room(gpu):
                self._load(time_s, gpu)
        if waiting and not self._loading and not any(self._queues.values()):
            self._load(time_s, waiting[0])  # each waits for another: into spare memory

    def _make_room(self, gpu: int) -> bool:
        """Drops what leaves the GPU and others hold, least asked first, if it must."""
        server, held_NX = self.loop.server_of[gpu], self.table.gpu_NX
        if self._used_G[gpu] < self._slots_G[gpu]:
            return True
        stays_X = self.placement.on_NLE[server].reshape(-1)
        leaves = np.flatnonzero((held_NX[server] == gpu) & ~stays_X)
        leaves = leaves[(held_NX[:, leaves] >= 0).sum(axis=0) > 1]
        excess = self._used_G[gpu] - self._slots_G[gpu] + 1
        asked = self.ledger.calls_NX[server, leaves]
        gone = leaves[asked.argsort(kind="stable")[:excess]]
        if len(gone):
            held_NX[server, gone] = -1
            self.table.update(gone)
            self._used_G[gpu] -= len(gone)
        return self._used_G[gpu] < self._slots_G[gpu]

    def _held(self) -> np.ndarray:
        """int64 [G]: blocks on each GPU of the cluster."""
        gpu_NX = self.table.gpu_NX
        return np.bincount(gpu_NX[gpu_NX >= 0], minlength=len(self._slots_G))

    def _memory(self) -> float:
        """The largest share of a GPU's slots that is taken now."""
        some = self._slots_G > 0
        return float((self._used_G[some] / self._slots_G[some]).max())

    def _load(self, time_s: float, gpu: int) -> None:
        """The next block waiting for this GPU's host link is copied."""
        self._loading[gpu] = self._loads[gpu].popleft()
        self._used_G[gpu] += 1
        self.peak_memory = max(self.peak_memory, self._memory())
        if self.loop.memory is not None:
            self.loop.memory.catch_up(gpu, time_s)
        there_s = self.loop.links.load(gpu, time_s, self._block_bytes, MIGRATE)
        self.heap.push(there_s, LANDED, gpu)

    def _send(self, time_s: float, route: int, _: int = 0) -> None:
        """The next chunk of a route; or its block is there, then the next block."""
        n, m = divmod(route, len(self._slots))
        queue = self._queues[route]
        if self._left[route] == 0:
            move = queue.popleft()
            self._loads[self._gpu(move)].append(move)
            self._left[route] = self._block_bytes
            self._load_all(time_s)
        if not queue:
            return
        chunk = min(self.policy.chunk_bytes, self._left[route])
        self._left[route] -= chunk
        there_s = self.loop.links.send(n, m, time_s, chunk, MIGRATE)
        if self._left[route]:  # the link is free before the chunk is there
            there_s -= self.cost_model.cluster.link(n, m).latency_s
        self.heap.push(max(there_s, time_s), SENDING, route)

    def _landed(self, time_s: float, gpu: int, _: int) -> None:
        move = self._loading.pop(gpu)
        block = move.layer * self.loop.pools.num_experts + move.block
        before = self.table.gpu_NX[move.server, block]
        if before >= 0:  # from one GPU of the server to another
            self._used_G[before] -= 1
        self.table.gpu_NX[move.server, block] = gpu
        self.table.update(np.array([block]))
        self._on_way -= 1
        self._load_all(time_s)
        if not self._on_way:
            self._finish(time_s)

    def _finish(self, time_s: float) -> None:
        """All is in place: what is no longer wanted goes."""
        self.migrations[-1].done_s = time_s
        self.table.place(self.placement.gpu_NLE)
        self._used_G = self._held()
