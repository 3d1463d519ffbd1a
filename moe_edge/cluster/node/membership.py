"""How processes of a cluster find each other.

All say hello to the scheduler, over the transport and its secret: who they are, and
what must be the same everywhere. Nothing else begins before all have come.
"""

import errno
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from moe_edge.cluster.content import check_same
from moe_edge.cluster.roles import SCHEDULER
from moe_edge.cluster.transport.base import Address, PeerLost, Refused
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import ConfigError

RETRY_S = 0.2
HELLO_S = 2.0  # for one hello
BELOW_EPHEMERAL = (20000, 32000)  # Linux gives connections ports from 32768 on
SAME = ("wire", "jaxlib")  # must agree, and all of `content` and `options`


def check_alike(process: int, theirs: Mapping[str, Any], ours: Mapping[str, Any]):
    """Raises ConfigError if a process that says hello does not fit the scheduler."""
    for name in SAME:
        if theirs.get(name) != ours[name]:
            raise ConfigError(
                f"process {process} has {name} {theirs.get(name)!r}, the scheduler "
                f"{ours[name]!r}; start all with the same"
            )
    theirs_by_file = theirs.get("content") or {}
    check_same(f"process {process}", theirs_by_file, ours["content"])
    options = theirs.get("options") or {}
    for name, value in ours["options"].items():
        if options.get(name) != value:
            raise ConfigError(
                f"process {process} has --{name} {options.get(name)}, the scheduler "
                f"{value}; start all with the same"
            )


class Reception:
    """The scheduler's side: takes hellos until all are there.

    Attributes:
      members: process -> what it said.
    """

    def __init__(self, facts: Mapping[str, Any], processes: int):
        self._facts, self._processes = facts, processes
        self.members: dict[int, dict] = {}
        self._arrivals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def hello(self, process: int, fields: dict) -> dict:
        """Answers a hello; the other process ends by what this raises."""
        check_alike(process, fields, self._facts)
        if not 0 < process < self._processes:
            raise ConfigError(
                f"process {process} is none of 1 to {self._processes - 1}; give "
                "another --process_id"
            )
        known = self.members.get(process)
        if known is not None and known["instance"] != fields["instance"]:
            raise ConfigError(
                f"process {process} is there already; give another --process_id"
            )
        self.members[process] = fields
        self._arrivals.put(process)
        return {}

    def wait(self, timeout_s: float) -> dict[int, dict]:
        """All members.

        Raises:
          ConfigError: some have not come in time.
        """
        until_s = time.monotonic() + timeout_s
        while len(self.members) < self._processes - 1:
            try:
                self._arrivals.get(timeout=max(until_s - time.monotonic(), 0.001))
            except queue.Empty:
                missing = sorted(set(range(1, self._processes)) - set(self.members))
                raise ConfigError(
                    f"processes {missing} have not come within {timeout_s:g} s; start "
                    "them, or raise --join_timeout_s"
                ) from None
        return self.members


class _Attempt:
    """Holds back losses during a hello until it is known whether it succeeds."""

    def __init__(self, on_lost: Callable[[int, str], None]):
        self._on_lost, self._lock = on_lost, threading.Lock()
        self._held: list[tuple[int, str]] | None = []

    def __call__(self, peer: int, kind: str) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append((peer, kind))
                return
        self._on_lost(peer, kind)

    def succeeded(self) -> None:
        with self._lock:
            held, self._held = self._held, None
        for loss in held:
            self._on_lost(*loss)


def say_hello(
    transport: Transport,
    coordinator: Address,
    facts: Mapping[str, Any],
    timeout_s: float,
    on_lost: Callable[[int, str], None],
) -> None:
    """A server's side: returns once the scheduler has taken it in.

    Args:
      on_lost: is told of losses from then on, and of one meanwhile.
    Raises:
      ConfigError: the scheduler refuses it, or does not answer in time.
    """
    until_s = time.monotonic() + timeout_s
    where = f"{coordinator.host}:{coordinator.calls}"
    while True:
        attempt = transport.on_lost = _Attempt(on_lost)
        transport.connect(SCHEDULER, coordinator)
        try:
            left_s = max(until_s - time.monotonic(), RETRY_S)
            deadline_s = min(left_s, HELLO_S)
            transport.control(SCHEDULER, "hello", dict(facts), deadline_s=deadline_s)
            attempt.succeeded()
            return
        except Refused as error:
            raise ConfigError(error.text) from error
        except PeerLost as error:
            if "secret" in str(error):
                raise ConfigError(
                    f"the scheduler at {where} refused the handshake; give all "
                    "processes the same --secret_file"
                ) from error
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"no scheduler at {where} within {timeout_s:g} s; is it running, "
                    "and is --coordinator its address?"
                ) from error
            time.sleep(RETRY_S)


def free_port(host: str) -> int:
    """A port that is free, and that no connection of anybody gets by chance."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(*BELOW_EPHEMERAL)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
