"""The life of a server in the main thread: sockets and signals."""

import contextlib
import os
import signal
import socket
import threading

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.serve.engine_thread import EngineThread
from moe_edge.serve.server_options import ServerOptions
from moe_edge.serve.service import Service, listen, run_until_signal, url_of


class Quiet:
    """A driver that nobody asks for anything."""

    wake_s, has_prompts = float("inf"), False

    def step(self):
        return None

    def clock(self) -> float:
        return 0.0


@contextlib.contextmanager
def caught(number: int):
    """What reaches the handler that was there before."""
    numbers = []
    before = signal.signal(number, lambda n, _: numbers.append(n))
    try:
        yield numbers
    finally:
        signal.signal(number, before)


def service_of(load, on_ready, closed: list) -> Service:
    options = ServerOptions(port=0)
    thread = EngineThread(load, closed.append)
    return Service(thread, None, options, listen("127.0.0.1", 0), on_ready)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_is_over(number):
    closed, quiet = [], Quiet()

    def ready():
        os.kill(os.getpid(), number)

    with caught(signal.SIGTERM) as terms, caught(signal.SIGINT) as interrupts:
        service = service_of(lambda: quiet, ready, closed)
        run_until_signal(service)
        assert closed == [quiet] and service.was_ready
        for late in (signal.SIGTERM, signal.SIGINT):  # while the process ends
            os.kill(os.getpid(), late)
        assert terms == interrupts == []


def test_signal_before_the_model_is_there_goes_to_the_process():
    begun, go_on = threading.Event(), threading.Event()

    def load():
        begun.set()
        os.kill(os.getpid(), signal.SIGTERM)
        go_on.wait()
        return Quiet()

    with caught(signal.SIGTERM) as numbers:
        service = service_of(load, lambda: pytest.fail("never ready"), [])
        run_until_signal(service)
        assert begun.is_set() and numbers == [signal.SIGTERM]
    go_on.set()


def test_what_loading_raises_is_raised():
    def load():
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        run_until_signal(service_of(load, lambda: None, []))


def test_sockets_that_cannot_be_had_are_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"listen on 127.0.0.1 port {port}: Addr"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="listen on 192.0.2.1 port 80: "):
        listen("192.0.2.1", 80)
    with pytest.raises(ConfigError, match="listen on no.such.host.invalid port 80: "):
        listen("no.such.host.invalid", 80)


def test_url_is_what_clients_call():
    with listen("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    if socket.has_ipv6:
        with contextlib.suppress(ConfigError), listen("::1", 0) as sock:
            assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"
