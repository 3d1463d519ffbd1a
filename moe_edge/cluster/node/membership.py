"""How processes of a cluster find each other, before and through `jax.distributed`.

`jax.distributed.initialize` ends a process without a word if another is missing. So all
first say hello to the scheduler, over the transport and its secret: who they are, and
what must be the same everywhere. Only when all have come they initialise, with
recoverability on, so that a server that dies later ends nobody else.
"""

import contextlib
import errno
import json
import queue
import random
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from moe_edge.cluster.roles import SCHEDULER
from moe_edge.cluster.transport.base import Address, PeerLost, Refused, Transport
from moe_edge.core.checks import ConfigError

RETRY_S = 0.2
HELLO_S = 2.0  # for one hello
HEARTBEAT_S = 10  # of jax.distributed; the transport's own are faster
BELOW_EPHEMERAL = (20000, 32000)  # Linux gives connections ports from 32768 on
ROSTER_KEY = "moe_edge/roster"
SAME = ("wire", "checkpoint", "jaxlib")  # must agree, and all `options`


def check_alike(process: int, theirs: Mapping[str, Any], ours: Mapping[str, Any]):
    """Raises ConfigError if a process that says hello does not fit the scheduler."""
    for name in SAME:
        if theirs.get(name) != ours[name]:
            raise ConfigError(
                f"process {process} has {name} {theirs.get(name)!r}, the scheduler "
                f"{ours[name]!r}; start all with the same"
            )
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


def say_hello(
    transport: Transport,
    coordinator: Address,
    facts: Mapping[str, Any],
    timeout_s: float,
) -> None:
    """A server's side: returns once the scheduler has taken it in.

    Raises:
      ConfigError: the scheduler refuses it, or does not answer in time.
    """
    until_s = time.monotonic() + timeout_s
    where = f"{coordinator.host}:{coordinator.calls}"
    while True:
        transport.connect(SCHEDULER, coordinator)
        try:
            left_s = max(until_s - time.monotonic(), RETRY_S)
            deadline_s = min(left_s, HELLO_S)
            transport.control(SCHEDULER, "hello", dict(facts), deadline_s=deadline_s)
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


def initialise_jax(coordinator: str, processes: int, process: int, timeout_s: float):
    """Joins `jax.distributed`; all processes call it at about the same time."""
    import jax

    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        coordinator,
        num_processes=processes,
        process_id=process,
        initialization_timeout=max(int(timeout_s), 1),
        heartbeat_timeout_seconds=HEARTBEAT_S,
    )


def key_value_store():
    """Client of jax.distributed's store and barriers; JAX has no public name for it."""
    from jax._src.distributed import global_state

    return global_state.client


@contextlib.contextmanager
def compiled_is_kept() -> Iterator[None]:
    """What is compiled here goes into the compilation cache, if there is one.

    JAX lets process 0 alone write it, which compiles nothing here. So this process is
    called 0 for a while; only the writing of the cache looks at that.
    """
    from jax._src.distributed import global_state

    number = global_state.process_id
    global_state.process_id = 0
    try:
        yield
    finally:
        global_state.process_id = number


def publish_roster(addresses: Mapping[int, Address]) -> None:
    """The scheduler tells where everybody listens."""
    stored = {str(n): [a.host, a.calls, a.blocks] for n, a in addresses.items()}
    key_value_store().key_value_set(ROSTER_KEY, json.dumps(stored))


def read_roster(timeout_s: float) -> dict[int, Address]:
    """What `publish_roster` told."""
    stored = key_value_store().blocking_key_value_get(ROSTER_KEY, int(1000 * timeout_s))
    return {int(n): Address(*where) for n, where in json.loads(stored).items()}


def meet(name: str, timeout_s: float) -> None:
    """A barrier of all processes."""
    key_value_store().wait_at_barrier(name, int(1000 * timeout_s))
