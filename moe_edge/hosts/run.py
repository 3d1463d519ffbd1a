"""A command as one of several processes: joined before it begins, left together.

All processes call the same function with the same arguments; its engine's arrays are of
all their devices. Process 0 alone writes and prints.
"""

import contextlib
import functools
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from moe_edge.core import processes
from moe_edge.core.checks import ConfigError, MoeEdgeError
from moe_edge.core.progress import counter
from moe_edge.core.run_folder import documented
from moe_edge.hosts.abort import one_line
from moe_edge.hosts.facts import compare, device_facts, program_facts
from moe_edge.hosts.frames import read_json
from moe_edge.hosts.join import meet
from moe_edge.hosts.link import HostLostError, Link
from moe_edge.hosts.options import HostOptions
from moe_edge.hosts.place import Place, find_place

# JAX's own, behind LOST_S also where its last beat was long before the stop: with 10,
# JAX aborted in one of five stops before our 7 s were over, on a loaded machine.
HEARTBEAT_S = 20
SHUTDOWN_S = 30  # for JAX to end in all processes once they are through
# Of every command: what each process has for itself.
OWN = frozenset(("out_dir", "overwrite", "dry_run", "config_text", "data_dir"))

_link: Link | None = None


def current_link() -> Link | None:
    """What joins this process to the others of its run; None: it runs alone."""
    return _link


def across_hosts(*own: str) -> Callable[[Callable], Callable]:
    """Lets a command run as several processes: it gets the flags of `HostOptions`.

    Args:
      own: arguments that processes need not have in common, besides OWN.
    """

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable:
        fields = inspect.signature(HostOptions).parameters
        parameters = inspect.signature(function).parameters
        if taken := fields.keys() & parameters.keys():
            raise TypeError(f"{function.__name__} has {', '.join(taken)} already")

        @functools.wraps(function)
        def call(**given) -> dict[str, Any]:
            options = HostOptions(**{f: given.pop(f) for f in fields if f in given})
            place = find_place(options, os.environ)
            if place is None or given.get("dry_run"):
                return function(**given)
            if given.get("offload") is not None or given.get("device_memory"):
                raise ConfigError(
                    "--device_memory with several processes, which share the experts "
                    "between their devices; leave it out"
                )
            facts = program_facts(given, OWN | {*own})
            with joined(place, options.join_timeout_s, facts) as link:
                return finish(link, function(**given))

        merged = [*parameters.values(), *fields.values()]
        call.__signature__ = inspect.Signature(merged)
        del call.__wrapped__  # gin would read the signature of that
        call.__doc__ = documented(inspect.getdoc(function) or "", HostOptions)
        return call

    return decorate


@contextlib.contextmanager
def joined(place: Place, timeout_s: float, facts: dict[str, str]) -> Iterator[Link]:
    """Inside this context the process is one of a run, and JAX has all their devices.

    Args:
      timeout_s: how long processes wait for each other.
      facts: that must agree (`facts.program_facts`).
    Raises:
      ConfigError: they do not meet, or differ.
      HostLostError: a program failed because another process is gone.
    """
    global _link
    processes.become(place.index, place.count)
    with counter("waiting for the other processes"):
        socks, told = meet(place, timeout_s, _port_for_jax)
    with one_line():
        link = Link(place.index, place.count, socks, on_stop=_end_in_order)
        try:
            compare(link, facts)
            _start_jax(place, int(told["jax_port"]), timeout_s)
            compare(link, device_facts())
            _link = link
            with _quiet(place.index > 0):
                yield link
        except BaseException as error:
            found = _left(link, error)
            if found is error:
                raise
            raise found from error
        finally:
            _link = None


def finish(link: Link, summary: dict[str, Any]) -> dict[str, Any]:
    """Waits until all processes are through; what process 0 found, in all of them."""
    import jax

    if link.index:
        link.send(b"through")
        summary = read_json(link.receive())
    else:
        link.gather()
        link.broadcast(json.dumps(summary, default=str).encode())
    jax.distributed.shutdown()
    link.close()
    return summary


def _port_for_jax() -> dict[str, int]:
    """A free port of process 0's machine for JAX's own service."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"jax_port": probe.getsockname()[1]}


def _start_jax(place: Place, port: int, timeout_s: float) -> None:
    """Joins `jax.distributed`; all call it at about the same time."""
    import jax

    # Its C++ would take SIGTERM, which ends a command here.
    jax.config.update("jax_enable_preemption_service", False)
    host = f"[{place.host}]" if ":" in place.host else place.host
    local = place.host in ("localhost", "127.0.0.1", "::1")
    jax.distributed.initialize(
        f"{host}:{port}",
        num_processes=place.count,
        process_id=place.index,
        local_device_ids=place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeout_s), 1),
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
        coordinator_bind_address=f"{host}:{port}" if local else None,
    )
    jax.devices()  # waits for those of all processes


def _left(link: Link, error: BaseException) -> BaseException:
    """Tells the others why this process ends; what it is to end by."""
    if isinstance(error, (MoeEdgeError, OSError, MemoryError, KeyboardInterrupt)):
        link.close(" ".join(str(error).split()) or "interrupted")
        return error
    # A collective that failed, most likely, because another process is gone.
    link.wait_lost()
    first = str(error).strip().partition("\n")[0]
    line = f"{type(error).__name__}: {first[:200]}"
    link.close(line)
    if type(error).__name__ != "JaxRuntimeError":
        return error
    return HostLostError(
        f"a step of several processes failed ({line}); start all of them again"
    )


def _end_in_order() -> None:
    """Process 0 was asked to end: as if by its own scheduler."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Prints nothing: process 0 says it."""
    if not wanted:
        yield
        return
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        stderr, sys.stderr = sys.stderr, nothing
        try:
            yield
        finally:
            sys.stderr = stderr
