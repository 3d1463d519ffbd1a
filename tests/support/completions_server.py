"""A server of completions without a model, as `launch/serve.py` answers."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

K, MAX_CONTEXT = 32, 64
USAGE = {"k_min": 8, "k_mean": 12.0, "k_max": 16}


class CompletionsServer:
    """Answers every request with its number of tokens, each an event of its own.

    Attributes:
      bodies: of the completions that were asked for.
      statuses: max_tokens -> status of such a request, in place of an answer; 0: the
        connection is closed, 1: an error within the stream, 2: no end of it.
      key: that requests must bring; None: any.
      connections: opened so far.
    """

    def __init__(self, statuses=None, key=None):
        self.bodies, self.statuses, self.key = [], statuses or {}, key
        self.connections = 0

    async def serve(self, reader, writer) -> None:
        """A connection."""
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._one(reader, writer):
                await writer.drain()
        writer.close()

    async def _one(self, reader, writer) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        body = await reader.readexactly(int(fields["Content-Length"]))
        given = json.loads(body) if body else None
        if self.key and fields.get("Authorization") != f"Bearer {self.key}":
            found = {"error": {"message": "wrong key", "code": "invalid_api_key"}}
            return self._json(writer, 401, found)
        if (method, path) == ("GET", "/v1/models"):
            ours = {"k": K, "max_context": MAX_CONTEXT, "vocab_size": 256}
            found = {"data": [{"id": "tiny", "moe_edge": ours}]}
            return self._json(writer, 200, found)
        if path == "/tokenize":
            tokens = list(given["prompt"].encode())
            return self._json(writer, 200, {"tokens": tokens})
        return await self._complete(writer, given)

    def _json(self, writer, status: int, found) -> bool:
        body = json.dumps(found).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n".encode())
        writer.write(b"Content-Type: application/json\r\n\r\n" + body)
        return True

    async def _complete(self, writer, given) -> bool:
        self.bodies.append(given)
        count = given["max_tokens"]
        status = self.statuses.get(count, 200)
        if status == 0:
            return False
        if status > 200:
            found = {"error": {"message": f"told to say {status}"}}
            return self._json(writer, status, found)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(count):
            last = number == count - 1
            choice = {"text": "x", "finish_reason": "length" if last else None}
            if status == 1 and last:
                _chunk(writer, {"error": {"message": "the engine raised"}})
            elif status != 2 or not last:
                _chunk(writer, {"choices": [choice]})
            await writer.drain()
        if status == 200:
            usage = {"completion_tokens": count, "moe_edge": USAGE}
            _chunk(writer, {"choices": [], "usage": usage})
            _chunk(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return True


def _chunk(writer, event) -> None:
    text = event if isinstance(event, str) else json.dumps(event)
    data = f"data: {text}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextlib.contextmanager
def running_server(**options) -> Iterator[tuple[str, CompletionsServer]]:
    """A server in a thread: its URL and itself."""
    server, ready, url = CompletionsServer(**options), threading.Event(), []
    loop = asyncio.new_event_loop()

    async def main():
        socket = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port = socket.sockets[0].getsockname()[1]
        url.append(f"http://127.0.0.1:{port}")
        ready.set()
        await stop.wait()
        socket.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield url[0], server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
