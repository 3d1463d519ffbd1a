"""A server on a port of this process, over a tiny model, and clients of it."""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import math
import socket
import tempfile
import threading
from pathlib import Path

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.load import load_engine
from moe_edge.engine.slots import RowSlots
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.loop import Limits, RequestLoop
from moe_edge.serve.app import make_app
from moe_edge.serve.chat_template import find_template
from moe_edge.serve.driver import Driver
from moe_edge.serve.engine_thread import EngineThread
from moe_edge.serve.experts import ExpertWatch
from moe_edge.serve.metrics import Metrics
from moe_edge.serve.observers import Observer
from moe_edge.serve.pages import page_routes
from moe_edge.serve.served_model import make_served_model
from moe_edge.serve.server_options import ServerOptions
from moe_edge.serve.service import Service, listen
from moe_edge.serve.watch_routes import watch_routes
from tests.support.tiny_checkpoint import write_tiny_checkpoint

WAIT_S = 300.0  # for what a loaded machine may take
MAX_BATCH = 2


@functools.cache
def checkpoint() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="moe_edge_serve_"))
    return write_tiny_checkpoint(folder / "tiny")


@functools.cache
def slots() -> RowSlots:
    """Shared by servers that run one after another: they compile nothing."""
    engine = load_engine(checkpoint(), with_tokenizer=False).engine
    rows = RowSlots(
        engine, max_rows=MAX_BATCH, max_context=128, prefill_chunk=32, prompt_rows=2
    )
    rows.warm_up()
    return rows


class HeldLoop(RequestLoop):
    """A loop that begins only as many steps as it may."""

    steps = math.inf

    def begin_step(self, number: int, now_s: float):
        if self.steps < 1:
            self.lanes[number].again_s = now_s + 0.005
            return []
        running = super().begin_step(number, now_s)
        self.steps -= bool(running)
        return running


class HeldDriver(Driver):
    """A driver whose steps can be held back, and made to fail."""

    failing = False

    def hold(self) -> None:
        """No step begins from here on; requests come and go."""
        self.loop.steps = 0

    def let(self, steps: float = math.inf) -> None:
        """So many more steps may."""
        self.loop.steps = steps

    def _compute(self, rows, now_s):
        if self.failing:
            raise RuntimeError("the text of a request: secret")
        return super()._compute(rows, now_s)


class Seen(Observer):
    """What observers are told."""

    def __init__(self):
        self.steps, self.ends, self.refusals = [], [], []

    def stepped(self, driver, stepped):
        self.steps.append(stepped)

    def ended(self, endpoint, live):
        self.ends.append((endpoint, live))

    def refused(self, endpoint, count):
        self.refusals += [endpoint] * count


@dataclasses.dataclass
class Reply:
    """An answer."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self):
        return json.loads(self.raw)

    @property
    def code(self) -> str:
        """Of an error, whose shape is checked."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"] and "\n" not in error["message"]
        return error["code"]

    @property
    def events(self) -> list:
        """Of a stream; the last one is `[DONE]`, or an error."""
        return events_of(self.raw)


def events_of(raw: bytes) -> list:
    parts = raw.decode().split("\n\n")
    assert parts.pop() == ""
    lines = [part.removeprefix("data: ") for part in parts]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events) -> str:
    """The text of a stream of one choice."""
    parts = [event["choices"][0] for event in events[:-1] if event["choices"]]
    return "".join(part["text"] for part in parts)


class LiveServer:
    """A running server.

    Attributes:
      driver: is there once it is ready; error: what ended the service.
    """

    def __init__(self, options: ServerOptions, max_waiting: int, key, load=None):
        self.sock = listen(options.host, options.port)
        self.port = self.sock.getsockname()[1]
        self.seen, self.error = Seen(), None
        self.clients: list[socket.socket] = []
        self._ready = threading.Event()
        limits = Limits(max_waiting)
        reader = open_checkpoint(checkpoint())
        self.model = make_served_model("tiny", reader, max_context=128)

        def make():
            loop = HeldLoop(Continuous(MAX_BATCH), limits=limits)
            return HeldDriver(slots(), loop)

        metrics, experts = Metrics(), ExpertWatch()
        observers = [self.seen, metrics, experts]
        self.thread = EngineThread(load or make, observers=observers)
        more = [*page_routes(), *watch_routes(self.thread, metrics, experts)]
        template = find_template(self.model.tokenizer.folder, options.chat_template)
        app = make_app(self.thread, self.model, template, options, key, more)
        given = self.thread, app, options, self.sock, self._ready.set
        self.service = Service(*given)
        self._runs = threading.Thread(target=self._run, daemon=True)
        self._runs.start()

    def _run(self) -> None:
        try:
            asyncio.run(self.service.run())
        except BaseException as error:
            self.error = error

    def wait_ready(self) -> None:
        assert self._ready.wait(WAIT_S), self.error

    def wait_end(self) -> None:
        self._runs.join(WAIT_S)
        assert not self._runs.is_alive()

    @property
    def driver(self) -> HeldDriver:
        return self.thread.driver

    def until(self, condition) -> None:
        """Waits until something is so; whoever knows when does not tell us."""
        for _ in range(int(WAIT_S * 100)):
            if condition():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it never was")

    # Clients.

    def is_listening(self) -> bool:
        """Whether somebody can connect."""
        try:
            self.connect().close()
        except ConnectionError:
            return False
        return True

    def connect(self) -> socket.socket:
        """Closed with the server, if not before."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        self.clients.append(sock)
        return sock

    def ask(self, method: str, path: str, body=None, headers=None) -> Reply:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            given = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, given | (headers or {}))
            response = connection.getresponse()
            heads = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, heads, response.read())

    def get(self, path: str, **headers) -> Reply:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body, **headers) -> Reply:
        return self.ask("POST", path, body, headers)

    def complete(self, **fields) -> Reply:
        """Of /v1/completions, greedy and short unless asked otherwise."""
        return self.post("/v1/completions", completion(**fields))

    def send_completion(self, **fields) -> socket.socket:
        """Asks without waiting for the answer."""
        sock = self.connect()
        body = json.dumps(completion(**fields)).encode()
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        return sock


def completion(**fields) -> dict:
    return {"prompt": "The river", "max_tokens": 8, "temperature": 0} | fields


class _Kept:
    """A file that outlives the answers that are read from it."""

    def __init__(self, file):
        self._file = file

    def makefile(self, mode: str):
        return self

    def close(self) -> None:
        pass

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def read_replies(sock: socket.socket, count: int) -> list[Reply]:
    """The next answers on a raw connection."""
    replies = []
    with sock.makefile("rb") as file:
        for _ in range(count):
            response = http.client.HTTPResponse(_Kept(file))
            response.begin()
            heads = {name.lower(): value for name, value in response.getheaders()}
            replies.append(Reply(response.status, heads, response.read()))
    return replies


def read_reply(sock: socket.socket) -> Reply:
    """The only answer on a raw connection."""
    return read_replies(sock, 1)[0]


@contextlib.contextmanager
def live_server(*, max_waiting: int = 64, key=None, load=None, ready=True, **options):
    """A server that is ready, and ended afterwards."""
    given = ServerOptions(**({"port": 0, "drain_s": 0.0} | options))
    server = LiveServer(given, max_waiting, key, load)
    try:
        server.until(server.is_listening)
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.service.stop()
        if server.driver is not None:
            server.driver.let()
        server.wait_end()
        for sock in server.clients:
            sock.close()
