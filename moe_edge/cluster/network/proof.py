"""How long bytes take by TCP from one network namespace to another one, measured."""

import ctypes
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CLONE_NEWNET = 0x40000000


def transfer_s(
    sender: Path, receiver: Path, address: str, num_bytes: int, within_s: float
) -> float:
    """Seconds until the receiver has said that all is there; no process is started.

    Args:
      sender, receiver: files of the namespaces.
      address: of the receiver.
      within_s: after which it is given up.
    Raises:
      OSError: a namespace cannot be entered, or the time is up.
    """
    with _entered(receiver) as there, _entered(sender) as here:
        server = there.submit(socket.create_server, (address, 0)).result()
        with server:
            server.settimeout(within_s)
            took = here.submit(_send, server.getsockname(), num_bytes, within_s)
            _receive(server, num_bytes)  # a socket keeps the namespace it was made in
            return took.result()


def _entered(namespace: Path) -> ThreadPoolExecutor:
    """A thread that sees the network of a namespace, and ends with the `with`."""
    return ThreadPoolExecutor(1, initializer=_enter, initargs=(namespace,))


def _enter(namespace: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
    handle = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(handle)


def _send(address: tuple[str, int], num_bytes: int, within_s: float) -> float:
    data = bytes(num_bytes)
    with socket.create_connection(address, timeout=within_s) as sender:
        started = time.perf_counter()
        sender.sendall(data)
        sender.recv(1)
        return time.perf_counter() - started


def _receive(server: socket.socket, num_bytes: int) -> None:
    with server.accept()[0] as receiver:
        receiver.settimeout(server.gettimeout())
        while num_bytes > 0:
            if not (got := receiver.recv(1 << 20)):
                raise ConnectionError("the sender closed the connection")
            num_bytes -= len(got)
        receiver.sendall(b"x")
