"""A server: runs its own requests, answers others, and does what the scheduler says.

The main thread steps the engine and, between two steps, takes over tables and orders.
The transport's threads answer calls; they never wait for anybody. A third thread brings
blocks. What others need to know goes to the scheduler as posts, in order.
"""

import dataclasses
import os
import queue
import threading
import time

import numpy as np

from moe_edge.cluster.network.interface import Interface
from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.engine import PlacedEngine
from moe_edge.cluster.node.holdings import BlockReader, Holdings
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.membership import SCHEDULER, compiled_is_kept
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.node.remote import Remote
from moe_edge.cluster.node.requests import Requests, ServedRequest
from moe_edge.cluster.node.tables import Tables
from moe_edge.cluster.node.warm_up import warm_up
from moe_edge.cluster.prism.bringer import Bringer
from moe_edge.cluster.scheduler.asked import SIGNALS
from moe_edge.cluster.transport.base import Call, PeerLost, Refused, Transport
from moe_edge.core.checks import MoeEdgeError, RequestError
from moe_edge.engine.weights import Weights

FIRST = 1  # the process of server 0
IDLE_S = 0.5  # how often a server without work looks around


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How a server runs.

    Attributes:
      slots: blocks that it may hold.
      max_batch: requests that take turns.
      partial: sums are returned instead of rows.
      call_s: deadline of a call.
      table_s: of waiting for a table after one failed.
      fetch_s: deadline of a block.
      device: network interface that is this server's alone, whose bytes are noted.
    """

    slots: int
    max_batch: int = 1
    partial: bool = False
    call_s: float = 5.0
    table_s: float = 30.0
    fetch_s: float = 30.0
    device: str | None = None


class SchedulerLost(MoeEdgeError):
    """The scheduler is gone: nothing can go on."""

    exit_code = 3


class Server:
    """One server of a cluster; also what the transport answers with (`Handlers`).

    Args:
      me: its number, from 0; others: how many there are in all.
      reader: an open checkpoint.
      weights: its dense part, on the device.
      programs: of the model, shared with other servers of this process; None: its own.
    """

    def __init__(
        self,
        me: int,
        others: int,
        reader,
        weights: Weights,
        transport: Transport,
        options: ServerOptions,
        programs: PlacedPrograms | None = None,
    ):
        config = weights.config
        self.me, self.options, self._transport = me, options, transport
        self._shape = config.num_layers, config.moe.num_experts
        self.holdings = Holdings(options.slots, self._shape, BlockReader(reader))
        self.tables = Tables(me, self.holdings)
        self.ledger = Ledger(me, others, self._shape)
        self._interface = Interface(options.device)
        if programs is None:
            programs = PlacedPrograms(config, self.holdings.blocks.dtype)
        self.answers = Answers(programs, self.holdings)
        remote = Remote(
            me,
            transport,
            self.answers,
            self.tables,
            self.ledger,
            first_peer=FIRST,
            partial=options.partial,
            deadline_s=options.call_s,
            table_s=options.table_s,
            on_lost=self._found_lost,
        )
        where = weights, self.holdings, remote, self.ledger, programs
        self.engine = PlacedEngine(*where)
        self._orders: queue.SimpleQueue = queue.SimpleQueue()
        self._requests: Requests | None = None
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._answered: list[tuple] = []
        self._bringer = Bringer(
            self.holdings, self._bring_from, self._arrived, self.fail
        )
        self._compiled = 0

    # What the transport answers with, in its threads.

    def call(self, peer: int, call: Call) -> np.ndarray | None:
        """Rows of another server's call; None if a block is not here."""
        started_s = time.perf_counter()
        rows = self.answers.compute(call)
        if rows is None and self._is_mine(call):
            rows = self.answers.compute(call, on_demand=True)
        ended_s = time.perf_counter()
        self._answered.append((started_s, ended_s - started_s, peer - FIRST))
        return rows

    def _is_mine(self, call: Call) -> bool:
        """Whether blocks that are not here are to be read for a call.

        So it is for blocks that nobody has, if the newest table names this server. A
        caller may have a newer one.
        """
        try:
            view = self.tables.newer(-1, 0.0)
        except MoeEdgeError:
            return False  # this server ends; another one may read them
        if view is None or call.version > view.version:
            return True
        return bool((view.target_LE[call.layer][call.block_P] == self.me).all())

    def block(self, layer: int, block: int) -> np.ndarray | None:
        """A block for another server."""
        if not (0 <= layer < self._shape[0] and 0 <= block < self._shape[1]):
            return None
        return self.holdings.record(layer, block)

    def control(self, peer: int, name: str, fields: dict, arrays: dict):
        """Orders of the scheduler, and its questions."""
        if peer != SCHEDULER:
            raise RequestError(f"process {peer} gives no orders; the scheduler does")
        if name == "time":
            return {"now_s": time.perf_counter()}, {}
        if name == "counts":
            return {}, self.ledger.counts()
        if name == "notes":
            return self._notes()
        if name == "strike":
            os.kill(os.getpid(), SIGNALS[fields["kind"]])
        elif name == "table":  # who waits in the midst of a step sees it at once
            self.tables.offer(fields["version"], *_table(arrays))
        elif name == "drop":  # nobody asks for them: before what comes into their slots
            with self.answers.reading:
                self.holdings.drop(arrays["cells"].tolist())
        elif name == "bring":
            self._bringer.bring(fields["order"], arrays["cells"])
        elif name == "lost":
            self._transport.disconnect(FIRST + fields["server"])
        elif name == "stop":
            self.tables.close(RequestError("the run is over"))
            self._stopped.set()
        self._orders.put((name, fields, arrays))
        return {}, {}

    def _notes(self):
        self.ledger.counts()
        sent = {
            f"{peer}:{int(kind)}": [count.messages, count.bytes]
            for (peer, kind), count in self._transport.traffic.sent().items()
        }
        facts = {
            "states": self.ledger.states,
            "rows": self.ledger.rows,
            "pairs": self.ledger.pairs,
            "local_pairs": self.ledger.local_pairs,
            "remote_blocks": self.ledger.remote_blocks,
            "most_used": self.holdings.most_used,
            "sent": sent,
            "interface": self._interface.sent,
            "compiled": self.engine.num_compiled() - self._compiled,
        }
        arrays = {f"lookups_{k}": v for k, v in self.ledger.lookups().items()}
        arrays["calls"] = self.ledger.calls()
        arrays["answered"] = np.array(self._answered, np.float64).reshape(-1, 3)
        arrays["brought"] = self._bringer.brought
        return facts, arrays

    # What this server tells the scheduler.

    def _tell(self, name: str, fields: dict) -> None:
        self._transport.post(SCHEDULER, name, fields)

    def on_lost(self, peer: int, kind: str) -> None:
        """The transport lost a process."""
        if peer == SCHEDULER:
            self.fail(SchedulerLost(f"the scheduler is {kind}; this server ends"))
        else:
            self._found_lost(peer - FIRST, kind)

    def _found_lost(self, server: int, kind: str) -> None:
        self._tell("lost", {"who": server, "kind": kind})

    def fail(self, error: BaseException) -> None:
        """Ends `run` by an error, whatever it waits for; any thread may call it."""
        if self._stopped.is_set():
            return
        self._error = self._error or error
        self.tables.close(error)
        self._stopped.set()
        self._orders.put(("wake", {}, {}))

    # The main thread.

    def run(self) -> None:
        """Serves until the scheduler says stop.

        Raises:
          SchedulerLost: it is gone. Whatever a thread of this server died of.
        """
        self._bringer.start()
        while not self._stopped.is_set():
            self._attend()
            if self._requests is not None and not self._requests.idle:
                self._requests.step()
        self._bringer.stop()
        if self._error is not None:
            raise self._error

    def _attend(self) -> None:
        """Orders that have come; waits for one if there is nothing else to do."""
        idle = self._requests is None or self._requests.idle
        while True:
            try:
                name, fields, arrays = self._orders.get(idle, IDLE_S if idle else None)
            except queue.Empty:
                return
            idle = False
            self._do(name, fields, arrays)

    def _do(self, name: str, fields: dict, arrays: dict) -> None:
        if name == "warm":
            sizes = arrays["sizes"].tolist()
            with compiled_is_kept():
                seconds = warm_up(self.engine, self.answers, sizes)
            self._tell("warm", {"seconds": seconds})
        elif name == "prepare":
            self._prepare(fields, arrays)
        elif name == "table":
            self._confirm()
        elif name == "request":
            self._requests.add(
                ServedRequest(
                    fields["id"],
                    arrays["prompt"].tolist(),
                    fields["max_new_tokens"],
                    arrays["known"].tolist(),
                )
            )

    def _confirm(self) -> None:
        """Between steps: the newest table is in force."""
        if self.tables.install() is not None:
            self._tell("confirmed", {"version": self.tables.view.version})

    def _prepare(self, fields: dict, arrays: dict) -> None:
        """A new run: its blocks are read, what was noted is forgotten."""
        self.holdings.fill(arrays["held_LE"].astype(bool))
        self.tables.begin(fields["version"], *_table(arrays))
        self.ledger.clear()
        self._answered.clear()
        self._bringer.clear()
        self.holdings.most_used = self.options.slots - self.holdings.free
        self._transport.traffic.reset()
        self._interface.reset()
        self._requests = Requests(
            self.engine,
            begin=self.ledger.token,
            on_token=self._new_token,
            on_error=lambda number, line: self._tell(
                "failed", {"id": number, "error": line}
            ),
            max_batch=self.options.max_batch,
        )
        self._compiled = self.engine.num_compiled()
        self._tell("ready", {"version": fields["version"]})

    def _new_token(self, number: int, token: int, done: bool, _: float) -> None:
        self._tell("token", {"id": number, "token": token, "done": done})

    # For the thread that brings blocks.

    def _bring_from(self, source: int, layer: int, block: int, out_R) -> bool:
        """A block of another server; whether it has come."""
        where = FIRST + source, layer, block
        try:
            return self._transport.fetch(*where, out_R, self.options.fetch_s)
        except (PeerLost, Refused):
            return False

    def _arrived(self, order: int, own: list[tuple[int, int]]) -> None:
        self._tell("arrived", {"order": order, "own": own})


def _table(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return arrays["target_LE"], arrays["read_LE"].astype(bool)
