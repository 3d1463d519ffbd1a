"""A worker: loads the experts that are predicted, computes with them, keeps nothing.

Everything happens in the thread that answers calls, in the order in which messages
come. A worker has slots for its share of one layer or of several.
What was predicted for its group's next layers is loaded as soon as slots are free;
what is asked for and not there is loaded then, while the main node waits.
"""

import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from moe_edge.cluster.node.answers import Answers, part_of
from moe_edge.cluster.node.holdings import BlockReader, Holdings
from moe_edge.cluster.node.node import Node, Order
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.transport.base import Call
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.offload.store import HostStore
from moe_edge.papers.od_moe.cluster.worker_slots import WorkerSlots

ATTEMPTS = 16  # of a call: a call's version is count * ATTEMPTS + attempt


class Worker:
    """A worker's side; its methods belong to the thread that answers calls.

    Attributes:
      reloads: blocks that were loaded when they were asked for in decoding.
      compute_s: of each decode call.
      wait_s: count of a layer -> how long its call waited for blocks.
    """

    def __init__(self, reader, programs: PlacedPrograms, num_slots: int):
        config = programs.config
        self._experts, self._programs = config.moe.num_experts, programs
        self._shape = config.num_layers, self._experts
        self._reader, self.num_slots = reader, num_slots
        self._store = HostStore(reader)
        # What coming layers will ask, by count; all up to `_passed` are over.
        self._coming: dict[int, list[tuple[int, int]]] = {}
        self._passed = -1
        self._over: int | None = None  # the layer that was answered last
        self.begin()
        self.clear()

    def clear(self) -> None:
        """Forgets what was counted."""
        self.reloads = 0
        self.compute_s: list[float] = []
        self.wait_s: dict[int, float] = {}
        self.slots.queue.reset_stats()

    def begin(self, resident: bool = False, bytes_per_s: float | None = None) -> None:
        """All slots are empty.

        Args:
          resident: holds all blocks instead, for comparison.
          bytes_per_s: of the link that slots are behind; None: a plain copy.
        """
        self.slots = WorkerSlots(self._store, self.num_slots, bytes_per_s)
        self._is_resident = resident
        held = self._all_blocks() if resident else self.slots
        self._answers = Answers(self._programs, held)
        self._coming.clear()
        self._passed = -1

    def _all_blocks(self) -> Holdings:
        layers = list(self._store.moe_layers)
        count = len(layers) * self._experts
        found = Holdings(count, self._shape, BlockReader(self._reader))
        held_LE = np.zeros(self._shape, bool)
        held_LE[layers] = True
        found.fill(held_LE)
        return found

    def expect(self, count: int, layer: int, experts: list[int]) -> None:
        """A prediction: what a coming layer will ask of this worker.

        One that comes too late is nothing; a later one of a layer takes the place of
        an earlier one (the shadow has started over).
        """
        if not self._is_resident and count > self._passed:
            some = experts[: self.num_slots]
            self._coming[count] = [(layer, expert) for expert in some]
            self._load_next()

    def _load_next(self) -> None:
        """Slots are for what is expected next, layer by layer: all else goes."""
        each = [cell for count in sorted(self._coming) for cell in self._coming[count]]
        cells = list(dict.fromkeys(each))[: self.num_slots]
        self.slots.release(keep=cells)
        for cell in cells:
            self.slots.load(*cell, "prefetch")

    def passed(self, count: int) -> None:
        """Layers up to this one are over: their blocks go, what is next is loaded."""
        self._forget(count)
        self._load_next()

    def _forget(self, count: int) -> None:
        """Layers up to this one are over."""
        self._passed = max(self._passed, count)
        for old in [old for old in self._coming if old <= count]:
            del self._coming[old]

    def compute(self, call: Call) -> np.ndarray:
        """Rows of a call; what is not here is loaded first."""
        if self._is_resident:
            started_s = time.perf_counter()
            rows = self._answers.compute(call)
            if call.bucket == 1:
                self.compute_s.append(time.perf_counter() - started_s)
            return rows
        self._answers.check(call)
        if call.bucket > 1:
            return self._compute_prompt(call)
        count = call.version // ATTEMPTS
        self._forget(count - 1)
        blocks = list(dict.fromkeys(call.block_P.tolist()))
        if len(blocks) <= self.num_slots:
            rows = self._compute_some(call, count, blocks)
        else:  # other workers are lost
            rows = np.empty((len(call.block_P), call.x_TD.shape[1]), np.float32)
            for first in range(0, len(blocks), self.num_slots):
                some = blocks[first : first + self.num_slots]
                mine = np.isin(call.block_P, some)
                rows[mine] = self._compute_some(part_of(call, mine), count, some)
        self._over = count
        return rows

    def go_on(self) -> None:
        """After an answer: what its layer had makes room for what comes."""
        if self._over is not None:
            self.passed(self._over)
            self._over = None
        self.slots.carrier.copy()

    def _compute_some(self, call: Call, count: int, blocks: list[int]) -> np.ndarray:
        layer = call.layer
        wanted = {(layer, block) for block in blocks}
        missing = len(wanted - self.slots.cells)
        self.reloads += missing
        if missing > self.slots.free:
            self.slots.release(keep=wanted)
        transfers = [self.slots.load(layer, block, "demand") for block in blocks]
        started_s = time.perf_counter()
        self.slots.queue.wait(transfers)
        waited_s = time.perf_counter()
        rows = self._answers.run(call, self.slots.slot_E(layer, self._experts))
        self.wait_s[count] = self.wait_s.get(count, 0.0) + waited_s - started_s
        self.compute_s.append(time.perf_counter() - waited_s)
        return rows

    def _compute_prompt(self, call: Call) -> np.ndarray:
        """One block after another; the next ones travel meanwhile."""
        self.slots.release()
        self._coming.clear()
        blocks, layer, rows = np.unique(call.block_P).tolist(), call.layer, None
        coming, ahead = deque(), iter(blocks)
        for block in blocks:
            while self.slots.free and (new := next(ahead, None)) is not None:
                coming.append(self.slots.load(layer, new, "demand"))
            self.slots.queue.wait([coming.popleft()])
            mine = call.block_P == block
            part = part_of(call, mine)
            result = self._answers.run(part, self.slots.slot_E(layer, self._experts))
            if rows is None:
                rows = np.empty((len(call.block_P), result.shape[1]), np.float32)
            rows[mine] = result
            kept = {(t.layer, t.expert) for t in coming}
            self.slots.release(keep=kept)
        return rows

    def rehearse(self, buckets: Iterable[int]) -> None:
        """Compiles the calls of so many tokens, from the slots in use."""
        config = self._programs.config
        for tokens in sorted({1, *buckets}):
            x_TD = np.zeros((tokens, config.d_model), np.float32)
            one_P = np.zeros(1, np.uint16)
            layer = config.moe_layers[0]
            self._answers.rehearse(Call(layer, tokens, 0, x_TD, one_P, one_P))

    def num_compiled(self) -> int:
        """How many programs have been compiled so far."""
        return self._programs.num_compiled()


class WorkerNode(Node):
    """The process of a worker: all that comes is done as it comes, in one thread."""

    def __init__(self, number: int, transport: Transport, worker: Worker):
        super().__init__(number, transport)
        self.worker = worker
        self._buckets: list[int] = []
        self._compiled = 0

    def call(self, peer: int, call: Call) -> np.ndarray:
        with self.faults_end_it("a call"):
            return self.worker.compute(call)

    def control(self, peer: int, name: str, fields: dict, arrays: dict):
        with self.faults_end_it(name):
            return super().control(peer, name, fields, arrays)

    def answered(self) -> None:
        with self.faults_end_it("a copy"):
            self.worker.go_on()

    def make_orders(self) -> dict[str, Order]:
        return super().make_orders() | {
            "load": Order(self._load, of_others=True),
            "passed": Order(self._passed, of_others=True),
            "warm": Order(self.warm),
            "prepare": Order(self._prepare),
            "notes": Order(self._notes),
        }

    def _load(self, fields, arrays) -> None:
        for count, layer, experts in fields["layers"]:
            self.worker.expect(count, layer, experts)
        self.answered()

    def _passed(self, fields, arrays) -> None:
        self.worker.passed(fields["count"])
        self.answered()

    def compile(self, fields, arrays) -> None:
        self._buckets = arrays["buckets"].tolist()
        self.worker.rehearse(self._buckets)

    def _prepare(self, fields, arrays) -> None:
        """A new pass: with all blocks here, or with few slots behind a slow link."""
        self.worker.begin(fields["resident"], fields["bytes_per_s"])
        self.worker.rehearse(self._buckets)
        self.worker.clear()
        self._compiled = self.worker.num_compiled()
        self.tell("ready", {"number": fields["number"]})

    def _notes(self, fields, arrays):
        """What this worker has counted."""
        worker, stats = self.worker, self.worker.slots.queue.stats()
        moved = [stats.demand, stats.prefetch]
        count = sum(total.count for total in moved)
        facts = {
            "reloads": worker.reloads,
            "t_worker_s": float(np.mean(worker.compute_s))
            if worker.compute_s
            else None,
            "compiled": worker.num_compiled() - self._compiled,
            "block_load_s": sum(t.seconds for t in moved) / count if count else None,
            "loaded_bytes": sum(total.bytes for total in moved),
            "slot_bytes": worker.slots.num_bytes,
            "slots": worker.num_slots,
        }
        waits = np.array(list(worker.wait_s.items()), np.float64).reshape(-1, 2)
        return facts, {"compute_s": np.array(worker.compute_s), "waits": waits}
