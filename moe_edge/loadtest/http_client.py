"""A small HTTP/1.1 client over asyncio streams: keep-alive, JSON, event streams.

Times of tokens are taken as they arrive, so there is little between socket and clock.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.core.json_reader import parse_json

BROKEN = (ConnectionError, asyncio.IncompleteReadError)  # the other side has gone


class HttpError(RequestError):
    """An answer that is no HTTP, or no JSON where that was expected."""


def parse_url(text: str) -> SplitResult:
    """Scheme, host and port of a server.

    Raises:
      ConfigError: another form.
    """
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # of a port that is no number
        usable = False
    if not usable or url.query or url.fragment:
        raise ConfigError(f"URL {text!r}: expected such as http://127.0.0.1:8000")
    return url


class Answer:
    """Status and headers of an answer whose body is yet to be read.

    Attributes:
      status: such as 200; headers: with names in lower case.
    """

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: dict):
        self._reader, self.status, self.headers = reader, status, headers
        self.is_read = False

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may serve another request."""
        closes = self.headers.get("connection", "").lower() == "close"
        sized = {"content-length", "transfer-encoding"} & self.headers.keys()
        return self.is_read and bool(sized) and not closes

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        reader = self._reader
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _number(await _line(reader), 16, "size of a chunk"):
                yield await reader.readexactly(size)
                await reader.readexactly(2)
            while await _line(reader):
                pass  # trailers
        elif "content-length" in self.headers:
            length = _number(self.headers["content-length"], 10, "content-length")
            yield await reader.readexactly(length)
        else:
            while part := await reader.read(1 << 16):
                yield part
        self.is_read = True

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.parts()])

    async def json(self) -> Any:
        """What the body says.

        Raises:
          HttpError: it is no JSON.
        """
        body = await self.body()
        return parse_json(f"answer {body[:60]!r}", body, HttpError)

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event."""
        buffer = b""
        async for part in self.parts():
            buffer = (buffer + part).replace(b"\r\n", b"\n")
            *whole, buffer = buffer.split(b"\n\n")
            for event in whole:
                for line in event.split(b"\n"):
                    if line.startswith(b"data:"):
                        yield line[5:].strip()


class Client:
    """Requests to one server; connections are used again.

    Args:
      url: of `parse_url`.
      key: sent as a bearer token; None: none.
    """

    def __init__(self, url: SplitResult, key: str | None = None):
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/")
        named = f"[{self._host}]" if ":" in self._host else self._host
        self._head = f"Host: {named}:{self._port}\r\nContent-Type: application/json\r\n"
        if key is not None:
            self._head += f"Authorization: Bearer {key}\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def close(self) -> None:
        """Closes what is open and idle."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncIterator[Answer]:
        """`async with client.request(...) as answer:` reads its body or drops it.

        Raises:
          OSError: nobody is there; HttpError: what is there speaks no HTTP.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while True:
            is_fresh = not self._idle
            if is_fresh:
                where = self._host, self._port
                streams = await asyncio.open_connection(*where, ssl=self._ssl)
            else:
                streams = self._idle.pop()
            try:
                answer = await _ask(*streams, sent)
                break
            except BaseException as error:
                streams[1].close()
                if is_fresh or not isinstance(error, BROKEN):
                    raise  # else an idle connection that the server had closed
        try:
            yield answer
        finally:
            if answer.keeps_alive:
                self._idle.append(streams)
            else:
                streams[1].close()

    async def get_json(self, method: str, path: str, given: Any = None) -> Any:
        """What a route says.

        Raises:
          RequestError: a status other than 200, with the server's message.
        """
        body = b"" if given is None else json.dumps(given).encode()
        async with self.request(method, path, body) as answer:
            found = await answer.json()
        if answer.status != 200:
            raise RequestError(f"{path}: {answer.status} {message_of(found)}")
        return found


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes
) -> Answer:
    """The head of the answer to a request."""
    writer.write(sent)
    await writer.drain()
    version, _, rest = (await _line(reader)).partition(" ")
    if not version.startswith("HTTP/1."):
        raise HttpError(f"answer begins with {version[:20]!r}, expected HTTP/1.1")
    headers = {}
    while line := await _line(reader):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Answer(reader, _number(rest[:3], 10, "status"), headers)


def message_of(found: Any) -> str:
    """What an answer in OpenAI's shape says of an error."""
    error = found.get("error") if isinstance(found, dict) else None
    error = error if isinstance(error, dict) else {}
    return str(error.get("message") or found)[:200]


async def _line(reader: asyncio.StreamReader) -> str:
    """A line of a head, without its end."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise HttpError(f"answer has a line of over {error.consumed} bytes") from error
    return line.decode("latin-1").rstrip("\r\n")


def _number(text: str, base: int, name: str) -> int:
    try:
        return int(text.partition(";")[0], base)
    except ValueError as error:
        raise HttpError(f"{name} of an answer is {text[:20]!r}") from error
