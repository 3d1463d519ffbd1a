"""The start of a run of several processes: they find each other at process 0.

JAX's own start ends a process by SIGABRT where the coordinator does not answer or
another process does not come. So they meet here first, where each refusal is one line.
"""

import errno
import socket
import time
from collections.abc import Callable
from typing import Any

from moe_edge.core.checks import ConfigError, MoeEdgeError
from moe_edge.hosts import frames
from moe_edge.hosts.frames import FrameError
from moe_edge.hosts.link import HostLostError
from moe_edge.hosts.place import Place

_TRY_S = 2.0  # of one attempt to connect
_RETRY_S = 0.1
_HELLO_S = 5.0  # for whoever connects to say who it is
_ANSWER_S = 10.0  # that process 0 may need beyond its own time


def meet(
    place: Place, timeout_s: float, tell: Callable[[], dict[str, Any]]
) -> tuple[dict[int, socket.socket], dict[str, Any]]:
    """Connects the processes.

    Args:
      timeout_s: how long they wait for each other.
      tell: process 0's: what it tells all others once they are there.
    Returns:
      (connections by number of the other process, what process 0 told).
    Raises:
      HostLostError: the coordinator does not answer, or processes are missing.
      ConfigError: they disagree about how many they are, or about the address.
    """
    if place.index == 0:
        return _gather(place, timeout_s, tell)
    return _connect(place, timeout_s)


def _gather(place: Place, timeout_s: float, tell):
    deadline_s = time.monotonic() + timeout_s
    socks: dict[int, socket.socket] = {}
    with _listen(place) as server:
        try:
            while len(socks) < place.count - 1:
                left_s = deadline_s - time.monotonic()
                server.settimeout(max(left_s, 0.01))
                try:
                    sock, _ = server.accept()
                except TimeoutError:
                    raise HostLostError(_missing(place, socks, timeout_s)) from None
                _admit(place, socks, sock)
            told = tell()
            for sock in socks.values():
                sock.sendall(frames.pack_json(frames.WELCOME, told))
        except BaseException as error:
            for sock in socks.values():
                _refuse(sock, str(error), isinstance(error, ConfigError))
            raise
    return socks, told


def _admit(place: Place, socks: dict[int, socket.socket], sock: socket.socket) -> None:
    """A connection becomes that of the process that it says it is."""
    sock.settimeout(_HELLO_S)
    try:
        kind, payload = frames.read(sock)
        hello = frames.read_json(payload)
        index, count = int(hello["index"]), int(hello["count"])
    except (OSError, LookupError, TypeError, ValueError):  # another program
        sock.close()
        return
    if kind != frames.HELLO:
        sock.close()
        return
    line = None
    if count != place.count:
        line = (
            f"process {index} was started with --num_processes {count}, process 0 with "
            f"{place.count}; give all the same"
        )
    elif index in socks or not 0 < index < place.count:
        line = (
            f"two processes have --process_id {index}; give each its own, from 0 to "
            f"{place.count - 1}"
        )
    if line is not None:
        _refuse(sock, line, True)
        raise ConfigError(line)
    socks[index] = sock


def _refuse(sock: socket.socket, line: str, is_input: bool) -> None:
    """Tells a process why the run does not begin, and whether its input is why."""
    told = {"line": line or "process 0 has ended", "is_input": is_input}
    try:
        sock.sendall(frames.pack_json(frames.REFUSAL, told))
        sock.close()
    except OSError:  # it is gone
        pass


def _missing(place: Place, socks, timeout_s: float) -> str:
    missing = sorted({*range(1, place.count)} - socks.keys())
    which = ", ".join(map(str, missing))
    return (
        f"process {which} of {place.count} did not come within {timeout_s:g} s "
        f"(--join_timeout_s); start it with --coordinator {_name(place)}"
    )


def _listen(place: Place) -> socket.socket:
    """A listening socket at the coordinator's address, else at all of this machine."""
    try:
        family, _, _, _, address = _resolve(place)
        try:
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        return socket.create_server(("", place.port))  # behind another address
    except OSError as error:
        raise ConfigError(
            f"--coordinator {_name(place)} cannot be listened on: {error.strerror}; "
            "process 0 runs on that host; choose another port if this one is taken"
        ) from error


def _resolve(place: Place):
    try:
        return socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"--coordinator {_name(place)}: no such host ({error.strerror}); name the "
            "machine of process 0"
        ) from error


def _connect(place: Place, timeout_s: float):
    deadline_s = time.monotonic() + timeout_s
    reason = "no answer"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            address = place.host, place.port
            sock = socket.create_connection(address, timeout=min(_TRY_S, left_s))
        except OSError as error:
            reason = error.strerror or "no answer"
            time.sleep(min(_RETRY_S, max(left_s, 0)))
            continue
        try:
            return _greet(place, sock, deadline_s)
        except FrameError as error:
            sock.close()
            raise ConfigError(
                f"--coordinator {_name(place)} is another program ({error}); name the "
                "port of process 0"
            ) from error
        except MoeEdgeError:
            sock.close()
            raise
        except OSError as error:  # it ends, or begins only now
            sock.close()
            reason = error.strerror or str(error)
            time.sleep(_RETRY_S)
    raise HostLostError(
        f"--coordinator {_name(place)} did not answer process {place.index} within "
        f"{timeout_s:g} s (--join_timeout_s): {reason}; is process 0 running there, "
        "and can this machine reach it?"
    )


def _greet(place: Place, sock: socket.socket, deadline_s: float):
    hello = {"index": place.index, "count": place.count}
    sock.settimeout(max(deadline_s - time.monotonic(), 0.0) + _ANSWER_S)
    sock.sendall(frames.pack_json(frames.HELLO, hello))
    kind, payload = frames.read(sock)
    told = frames.read_json(payload)
    if kind not in (frames.WELCOME, frames.REFUSAL) or not isinstance(told, dict):
        raise FrameError("it welcomes nobody")
    if kind == frames.REFUSAL:
        refused = ConfigError if told.get("is_input") else HostLostError
        raise refused(str(told.get("line")))
    return {0: sock}, told


def _name(place: Place) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{host}:{place.port}"
