"""The life of a server: it listens, loads, serves, drains and ends."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from moe_edge.core.checks import ConfigError
from moe_edge.serve.connection import limited
from moe_edge.serve.engine_thread import EngineThread
from moe_edge.serve.server_options import ServerOptions

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_WORDS_S = 2.0  # for answers that are on their way when the engine is at rest


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, not listening yet.

    Raises:
      ConfigError: the port is in use, or this machine has no such address.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another "
            "--port (0: any free one) or --host"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Where clients find a socket."""
    host, port, *_ = sock.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours."""
        yield


class Service:
    """A server on a socket.

    Args:
      on_ready: called once when the model is there.
    """

    def __init__(
        self,
        thread: EngineThread,
        app: ASGIApp,
        options: ServerOptions,
        sock: socket.socket,
        on_ready: Callable[[], Any],
    ):
        self._thread, self._options, self._sock = thread, options, sock
        self._on_ready, self._runs = on_ready, threading.Event()
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=limited(options.receive_s, options.idle_client_s),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="critical",  # its lines may quote a request
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )

    async def run(self) -> None:
        """Serves until `stop`, or a signal in the main thread.

        Raises:
          EngineLostError, or what `load` of the engine thread raised.
        """
        self._loop = asyncio.get_running_loop()
        self._is_told = asyncio.Event()  # to end
        self._hurry = asyncio.Event()
        self._runs.set()
        serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        thread = self._thread
        thread.start()
        try:
            await _first(thread.is_loaded, self._is_told, serving)
            if thread.state == "ok":
                self._on_ready()
                await _first(thread.is_failed, self._is_told, serving)
                drain = asyncio.create_task(thread.drain(self._options.drain_s))
                await _first(thread.is_failed, self._hurry, drain)
                if not drain.done():
                    drain.cancel()
                    await thread.drain(0.0)
        finally:
            self._server.should_exit = True
            await serving
            if thread.is_loaded.is_set():
                await thread.stop()
        if thread.error is not None:
            raise thread.error

    def stop(self) -> None:
        """Takes nothing on any more and ends; a second time: at once. Any thread."""
        self._runs.wait()
        with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self._is_told.is_set():
            self._hurry.set()
        self._is_told.set()

    @property
    def was_ready(self) -> bool:
        """Whether the model was there before the end."""
        return self._thread.is_loaded.is_set()


async def _first(*awaited: asyncio.Event | asyncio.Task) -> None:
    """Waits until one of them has happened."""
    tasks = [
        each if isinstance(each, asyncio.Task) else asyncio.create_task(each.wait())
        for each in awaited
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, each in zip(tasks, awaited, strict=True):
            if task is not each:
                task.cancel()


def run_until_signal(service: Service) -> None:
    """Runs a service in the main thread, where SIGTERM and SIGINT end it.

    A signal before the model is there ends the process as without a service: nothing
    is open, and loading cannot be stopped. After a later one both stay ignored: the
    process is about to end, and a further signal must not spoil how.
    """
    told = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        # Not the loop's own handlers: it puts the default action back as it closes.
        def tell(number, frame) -> None:
            told.append(number)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(service.stop)

        for number in SIGNALS:
            signal.signal(number, tell)
        await service.run()

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        asyncio.run(main())
    finally:
        ends = told and service.was_ready
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ends else handler)
    if told and not service.was_ready:
        signal.raise_signal(told[0])
