"""Process 0: requests, statistics, placement, failures. It serves nothing itself.

One thread takes events (posts of servers, losses, time) and acts on them; nothing here
waits for a server but questions with a deadline. A method's run begins with every
server holding its blocks and ends when every request has its last token or is lost.
"""

import dataclasses
import os
import queue
import signal
import time
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.cluster.asked import Asked, Drill, Failure
from moe_edge.cluster.membership import Reception
from moe_edge.cluster.table_keeper import TableKeeper
from moe_edge.cluster.transport import PeerLost, Refused, Transport
from moe_edge.core.checks import MoeEdgeError, RequestError
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.migration_policy import MigrationPolicy

FIRST = 1  # the process of server 0
QUESTION_S = 20.0  # deadline of what a server is asked
ALIVE_S = 2.0  # for a server that a caller found overdue
TICK_S = 0.05


class NobodyLeft(MoeEdgeError):
    """All servers are lost."""

    exit_code = 3


@dataclasses.dataclass
class MethodRun:
    """What came of one method.

    Attributes:
      asked: all requests, with tokens and times.
      keeper: the table's history.
      failures: servers that were lost.
      notes: server -> (facts, arrays) of its ledger; the lost have none.
      offsets_s: server -> its clock minus the scheduler's.
      begun_s: when the run began, by the scheduler's clock.
    """

    asked: list[Asked]
    keeper: TableKeeper
    failures: list[Failure]
    notes: dict[int, tuple[dict, dict]]
    offsets_s: dict[int, float]
    begun_s: float


class Scheduler:
    """Runs methods one after another over the same servers.

    Args:
      servers: how many there are.
      moe_layers: of the model; tables and placements count these only.
      num_layers, num_experts: of the model.
      slots_N: blocks that each server may hold, its spare one among them.
      pids: of the servers' processes, for drills; None for those elsewhere.
    """

    def __init__(
        self,
        transport: Transport,
        reception: Reception,
        servers: int,
        moe_layers: Sequence[int],
        num_layers: int,
        num_experts: int,
        slots_N: Sequence[int],
        pids: Mapping[int, int | None],
    ):
        self.transport, self._reception = transport, reception
        self.moe_layers, self.num_layers = list(moe_layers), num_layers
        self.num_experts, self.slots_N = num_experts, np.array(slots_N, np.int64)
        self.alive_N = np.ones(servers, bool)
        self.pids = dict(pids)
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self.failures: list[Failure] = []
        transport.on_lost = self.on_lost

    # What the transport answers with, in its threads.

    def call(self, peer, call):
        raise RequestError("the scheduler computes no blocks")

    def block(self, layer, block):
        return None

    def control(self, peer: int, name: str, fields: dict, arrays: dict):
        """Hellos are answered; all else is an event."""
        if name == "hello":
            return self._reception.hello(peer, fields), {}
        self._events.put((peer - FIRST, name, fields, arrays))
        return {}, {}

    def on_lost(self, peer: int, kind: str) -> None:
        self._events.put(
            (peer - FIRST, "gone", {"who": peer - FIRST, "kind": kind}, {})
        )

    # Talking to servers.

    @property
    def alive(self) -> list[int]:
        return np.flatnonzero(self.alive_N).tolist()

    def tell(self, server: int, name: str, fields=None, arrays=None) -> None:
        self.transport.post(FIRST + server, name, fields or {}, arrays or {})

    def tell_all(self, name: str, fields=None, arrays=None) -> None:
        for server in self.alive:
            self.tell(server, name, fields, arrays)

    def ask(self, server: int, name: str) -> tuple[dict, dict] | None:
        """A server's answer; None if it is lost meanwhile."""
        try:
            return self.transport.control(
                FIRST + server, name, {}, {}, deadline_s=QUESTION_S
            )
        except (PeerLost, Refused):
            return None

    def answers(self, server: int) -> bool:
        """Whether a server on the list answers a question soon."""
        if not (0 <= server < len(self.alive_N) and self.alive_N[server]):
            return False
        try:
            self.transport.control(FIRST + server, "time", deadline_s=ALIVE_S)
        except (PeerLost, Refused):
            return False
        return True

    def full(self, array_NLE: np.ndarray, empty=0) -> np.ndarray:
        """[..., L of MoE layers, E] -> [..., all layers, E]."""
        shape = (*array_NLE.shape[:-2], self.num_layers, self.num_experts)
        full = np.full(shape, empty, array_NLE.dtype)
        full[..., self.moe_layers, :] = array_NLE
        return full

    def wait_for_all(self, name: str, timeout_s: float) -> dict[int, dict]:
        """Collects one post of that name from every living server."""
        until_s, got = time.monotonic() + timeout_s, {}
        while set(self.alive) - set(got):
            event = self.next_event(until_s)
            if event is None:
                missing = sorted(set(self.alive) - set(got))
                raise MoeEdgeError(
                    f"servers {missing} have not said {name!r} within {timeout_s:g} s; "
                    "see their logs"
                )
            server, kind, fields, _ = event
            if kind == name:
                got[server] = fields
            elif kind in ("gone", "lost"):
                self.lose(fields["who"], fields["kind"])
        return got

    def next_event(self, until_s: float):
        """(server, name, fields, arrays) of what happens next; None: nothing did."""
        try:
            return self._events.get(timeout=max(until_s - time.monotonic(), 0.001))
        except queue.Empty:
            return None

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

    def lose(self, server: int, kind: str) -> bool:
        """Takes a server off the list; whether it was on it."""
        if not (0 <= server < len(self.alive_N) and self.alive_N[server]):
            return False
        self.alive_N[server] = False
        self.transport.disconnect(FIRST + server)
        self.tell_all("lost", {"server": server})
        if not self.alive_N.any():
            raise NobodyLeft("all servers are lost; nothing can go on")
        return True

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
        """Serves requests from a placement on, which may follow what is asked."""
        asked = list(asked)
        keeper = TableKeeper(self, held_NLE, policy, cost_model)
        targets_NLE = keeper.targets()
        for server in self.alive:
            arrays = {
                "held_LE": self.full(held_NLE[server]).astype(np.uint8),
                "target_LE": self.full(targets_NLE[server], server),
            }
            self.tell(server, "prepare", {"version": 0}, arrays)
        self.wait_for_all("ready", ready_s)
        offsets_s, self.failures = self.clock_offsets(), []
        begun_s = time.perf_counter()
        keeper.begin(begun_s)
        _Serving(self, keeper, asked, drill, begun_s).run()
        notes = {}
        for server in self.alive:
            answer = self.ask(server, "notes")
            if answer is not None:
                notes[server] = answer
        return MethodRun(asked, keeper, self.failures, notes, offsets_s, begun_s)

    def strike(self, drill: Drill) -> None:
        """Kills or stops a process, as a drill says."""
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[drill.kind]
        pid = os.getpid() if drill.who == "scheduler" else self.pids[int(drill.who)]
        os.kill(pid, number)


class _Serving:
    """The events of one method's run."""

    def __init__(self, scheduler: Scheduler, keeper, asked, drill, begun_s: float):
        self.scheduler, self.keeper, self.asked = scheduler, keeper, asked
        self._drill, self._begun_s = drill, begun_s
        self._coming = sorted(asked, key=lambda one: one.arrival_s)[::-1]
        self._by_id = {one.id: one for one in asked}
        self._generated = 0
        self._struck_s: float | None = None
        self._resuming: list[Failure] = []
        self._actions = {
            "token": self._token,
            "failed": self._failed,
            "gone": self._gone,
            "lost": self._gone,
            "arrived": keeper.arrived,
            "confirmed": keeper.confirmed,
        }

    @property
    def now_s(self) -> float:
        """Seconds from the beginning of the run."""
        return time.perf_counter() - self._begun_s

    def run(self) -> None:
        """To the last token of the last request."""
        while not all(one.ended for one in self.asked):
            self._send_due()
            wait_s = min(self._until_next(), TICK_S)
            event = self.scheduler.next_event(time.monotonic() + wait_s)
            if event is not None:
                server, name, fields, _ = event
                action = self._actions.get(name)
                if action is not None:
                    action(server, fields)
            self.keeper.tick(busy=not all(one.ended for one in self.asked))
        self.keeper.settle()

    def _until_next(self) -> float:
        if not self._coming:
            return TICK_S
        return max(self._coming[-1].arrival_s - self.now_s, 0.0)

    def _send_due(self) -> None:
        while self._coming and self._coming[-1].arrival_s <= self.now_s:
            one = self._coming.pop()
            one.arrived_s = time.perf_counter()
            self._send(one)

    def _send(self, one: Asked) -> None:
        """To its server, or to the next one after it that lives."""
        alive_N = self.scheduler.alive_N
        ring = (one.home + np.arange(len(alive_N))) % len(alive_N)
        one.at = int(ring[alive_N[ring]][0])
        fields = {"id": one.id, "max_new_tokens": one.max_new_tokens}
        arrays = {
            "prompt": np.array(one.prompt, np.int32),
            "known": np.array(one.tokens, np.int32),
        }
        self.scheduler.tell(one.at, "request", fields, arrays)

    def _token(self, server: int, fields: dict) -> None:
        one = self._by_id.get(fields["id"])
        if one is None or one.at != server or one.ended:
            return  # of a server that was taken off the list
        now_s = time.perf_counter()
        one.tokens.append(fields["token"])
        one.times_s.append(now_s)
        one.done = fields["done"]
        self._generated += 1
        for failure in self._resuming:
            failure.resumed_s = self.now_s
        self._resuming.clear()
        drill = self._drill
        if drill is not None and self._generated >= drill.tokens:
            self._drill, self._struck_s = None, self.now_s
            self.scheduler.strike(drill)

    def _failed(self, server: int, fields: dict) -> None:
        one = self._by_id.get(fields["id"])
        if one is not None and one.at == server and not one.ended:
            one.error = fields["error"]

    def _gone(self, server: int, fields: dict) -> None:
        """A server is lost, whoever noticed: the scheduler alone decides."""
        who, kind = fields["who"], fields["kind"]
        if kind == "overdue" and self.scheduler.answers(who):
            self.keeper.repeat()  # only slow: whoever waits asks again
            return
        if not self.scheduler.lose(who, "dead" if kind == "dead" else "hung"):
            return
        failure = Failure(who, "dead" if kind == "dead" else "hung", self.now_s)
        failure.struck_s = self._struck_s
        self.scheduler.failures.append(failure)
        self._resuming.append(failure)
        self.keeper.lost(who)
        for one in self.asked:
            if one.at == who and not one.ended and one.arrived_s is not None:
                self._send(one)
