"""Process 0: who is there, what servers are told and asked. It serves nothing itself.

Posts of servers, and losses that the transport reports, queue up as events for one
thread. Nothing here waits for a server but questions with a deadline. `serving.py` acts
on the events of a method's run.
"""

import dataclasses
import os
import queue
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.cluster.node.membership import Reception
from moe_edge.cluster.prism.judge import Judge
from moe_edge.cluster.prism.table_keeper import TableKeeper
from moe_edge.cluster.scheduler.asked import SIGNALS, Asked, Drill, Failure, NobodyLeft
from moe_edge.cluster.scheduler.serving import Serving
from moe_edge.cluster.transport.base import PeerLost, Refused, Transport
from moe_edge.core.checks import MoeEdgeError, RequestError
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.migration_policy import MigrationPolicy

FIRST = 1  # the process of server 0
QUESTION_S = 20.0  # deadline of what a server is asked before a run
NOTES_S = 120.0  # of all that it noted, when a run is over
SOON_S = 2.0  # of what it is asked meanwhile
NO_LAYER = 2**16 - 1  # of which nobody has a block


class Event(NamedTuple):
    """Something that a server has said, or that became of it.

    Attributes:
      server: who; name: what.
      at_s: when it came, by `time.perf_counter`.
    """

    server: int
    name: str
    fields: dict
    at_s: float


@dataclasses.dataclass
class MethodRun:
    """What came of one method.

    Attributes:
      asked: all requests, with tokens and times.
      keeper: the table's history.
      decisions: on migration, of all periods.
      failures: servers that were lost.
      notes: server -> (facts, arrays) of its ledger; the lost have none.
      notes_missing: servers that live and gave none.
      offsets_s: server -> its clock minus the scheduler's.
      begun_s: when the run began, by the scheduler's clock.
    """

    asked: list[Asked]
    keeper: TableKeeper
    decisions: list[dict]
    failures: list[Failure]
    notes: dict[int, tuple[dict, dict]]
    offsets_s: dict[int, float]
    begun_s: float
    notes_missing: list[int]


class Scheduler:
    """Runs methods one after another over the same servers.

    Args:
      reception: takes hellos; None where all are known.
      servers: how many there are.
      moe_layers: of the model; tables and placements count these only.
      num_layers, num_experts: of the model.
      slots_N: blocks that each server may hold, its spare one among them.

    Attributes:
      alive_N: bool, who is on the list.
    """

    def __init__(
        self,
        transport: Transport,
        reception: Reception | None,
        servers: int,
        moe_layers: Sequence[int],
        num_layers: int,
        num_experts: int,
        slots_N: Sequence[int],
    ):
        self.transport, self._reception = transport, reception
        self.moe_layers, self.num_layers = list(moe_layers), num_layers
        self.num_experts, self.slots_N = num_experts, np.array(slots_N, np.int64)
        self.alive_N = np.ones(servers, bool)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lost_between: list[tuple[int, str]] = []  # runs
        transport.on_lost = self.on_lost

    # What the transport answers with, in its threads.

    def call(self, peer, call):
        raise RequestError("the scheduler computes no blocks")

    def block(self, layer, block):
        return None

    def control(self, peer: int, name: str, fields: dict, arrays: dict):
        """Hellos are answered; all else is an event."""
        if name == "hello" and self._reception is not None:
            return self._reception.hello(peer, fields), {}
        self._events.put(Event(peer - FIRST, name, fields, time.perf_counter()))
        return {}, {}

    def on_lost(self, peer: int, kind: str) -> None:
        """The transport lost a server."""
        server = peer - FIRST
        fields = {"who": server, "kind": kind}
        self._events.put(Event(server, "lost", fields, time.perf_counter()))

    # Talking to servers.

    @property
    def alive(self) -> list[int]:
        return np.flatnonzero(self.alive_N).tolist()

    def is_alive(self, server: int) -> bool:
        """Whether a server is on the list."""
        known = isinstance(server, int) and 0 <= server < len(self.alive_N)
        return known and bool(self.alive_N[server])

    def tell(self, server: int, name: str, fields=None, arrays=None) -> None:
        self.transport.post(FIRST + server, name, fields or {}, arrays or {})

    def tell_all(self, name: str, fields=None, arrays=None) -> None:
        for server in self.alive:
            self.tell(server, name, fields, arrays)

    def ask(self, server: int, name: str, deadline_s=QUESTION_S):
        """A server's answer (fields, arrays); None if it gives none."""
        try:
            return self.transport.control(FIRST + server, name, deadline_s=deadline_s)
        except (PeerLost, Refused):
            return None

    def ask_soon(self, server: int, name: str):
        """The same while others wait: None also if it is busy for long."""
        return self.ask(server, name, SOON_S)

    def answers(self, server: int) -> bool:
        """Whether a server still answers, however long the call that it is at.

        So it is asked for a block that there is none of: blocks have their own thread.
        """
        nothing = np.empty(1, np.uint8)
        try:
            self.transport.fetch(FIRST + server, NO_LAYER, 0, nothing, SOON_S)
        except PeerLost:
            return False
        except Refused:
            pass
        return True

    def full(self, array_NLE: np.ndarray, empty=0) -> np.ndarray:
        """[..., L of MoE layers, E] -> [..., all layers, E]."""
        shape = (*array_NLE.shape[:-2], self.num_layers, self.num_experts)
        full = np.full(shape, empty, array_NLE.dtype)
        full[..., self.moe_layers, :] = array_NLE
        return full

    def next_event(self, until_s: float) -> Event | None:
        """What has come; None: nothing, by this time of `time.monotonic`.

        What a server says that is on the list no more is dropped.
        """
        while True:
            try:
                event = self._events.get(timeout=max(until_s - time.monotonic(), 0.001))
            except queue.Empty:
                return None
            if self.is_alive(event.server):
                return event

    def wait_for_all(
        self, name: str, timeout_s: float, may_lose: bool = True
    ) -> dict[int, dict]:
        """One post of that name from every server on the list.

        Args:
          may_lose: go on without those that are lost meanwhile.
        Raises:
          MoeEdgeError: some have not said it in time, or are lost. NobodyLeft: all are.
        """
        until_s, got = time.monotonic() + timeout_s, {}
        while missing := sorted(set(self.alive) - set(got)):
            event = self.next_event(until_s)
            if event is None:
                raise MoeEdgeError(
                    f"servers {missing} have not said {name!r} within {timeout_s:g} s; "
                    "see their logs"
                )
            if event.name == name:
                got[event.server] = event.fields
            elif event.name == "lost":
                who, kind = event.fields.get("who"), event.fields.get("kind")
                if kind == "overdue" or not self.lose(who):
                    continue
                if not may_lose:
                    raise NobodyLeft(f"server {who} is {kind} before all have begun")
                self._lost_between.append((who, kind))
        return got

    def clock_offsets(self) -> dict[int, float]:
        """Server -> its clock minus ours, by the quickest of some questions."""
        found = {}
        for server in self.alive:
            best = None
            for _ in range(5):
                before_s = time.perf_counter()
                answer = self.ask(server, "time")
                after_s = time.perf_counter()
                if answer is not None and (
                    best is None or after_s - before_s < best[0]
                ):
                    middle_s = (before_s + after_s) / 2
                    best = after_s - before_s, answer[0]["now_s"] - middle_s
            if best is not None:
                found[server] = best[1]
        return found

    def lose(self, server: int) -> bool:
        """Takes a server off the list; whether it was on it.

        Raises:
          NobodyLeft: it was the last one.
        """
        if not self.is_alive(server):
            return False
        self.alive_N[server] = False
        self.tell(server, "stop")  # should it be there after all
        self.transport.disconnect(FIRST + server)
        self.tell_all("lost", {"server": server})
        if not self.alive_N.any():
            raise NobodyLeft("all servers are lost; nothing can go on")
        return True

    def strike(self, drill: Drill) -> None:
        """Kills or stops a process, as a drill says."""
        if drill.who == "scheduler":
            os.kill(os.getpid(), SIGNALS[drill.kind])
        else:
            self.tell(int(drill.who), "strike", {"kind": drill.kind})

    # One method.

    def run_method(
        self,
        held_NLE: np.ndarray,
        asked: Sequence[Asked],
        *,
        policy: MigrationPolicy | None = None,
        cost_model: CostModel | None = None,
        drill: Drill | None = None,
        ready_s: float = 120.0,
    ) -> MethodRun:
        """Serves requests from a placement on, which may follow what is asked.

        It begins with every server holding its blocks, and ends when every request has
        its last token or is lost, and nothing is on its way.
        """
        asked, judge = list(asked), Judge(self, held_NLE.shape, policy, cost_model)
        self._lost_between.clear()  # the keeper looks who is there
        keeper = TableKeeper(self, held_NLE, judge)
        for server, arrays in keeper.tables().items():
            held_LE = self.full(keeper.held_NLE[server])
            self.tell(server, "prepare", {"version": 0}, {"held_LE": held_LE} | arrays)
        self.wait_for_all("ready", ready_s)
        offsets_s = self.clock_offsets()
        begun_s = time.perf_counter()
        keeper.begin(begun_s)
        serving = Serving(self, keeper, asked, drill, begun_s)
        for who, kind in self._lost_between:
            serving.replace(who, kind)
        serving.run()
        notes = {}
        for server in self.alive:
            answer = self.ask(server, "notes", NOTES_S)
            if answer is not None:
                notes[server] = answer
        missing = [n for n in self.alive if n not in notes and self.answers(n)]
        if missing:
            print(
                f"warning: servers {missing} gave no notes within {NOTES_S:g} s; what "
                "is counted leaves them out",
                file=sys.stderr,
            )
        where = asked, keeper, judge.decisions, serving.failures
        return MethodRun(*where, notes, offsets_s, begun_s, missing)
