"""Long bodies wait for each other, and for nobody who is gone."""

import asyncio
import json
import threading

import pytest

from moe_edge.serve import app
from moe_edge.serve.errors import ApiError
from moe_edge.serve.guards import ClientGone
from moe_edge.serve.workers import SHORT_BYTES, Workers
from tests.support.live_server import WAIT_S, completion, live_server, read_reply

LONG = b" " * (SHORT_BYTES + 1)


async def stays():
    await asyncio.Event().wait()


def test_who_goes_makes_room_and_is_never_read():
    begun, go_on, read = threading.Event(), threading.Event(), []

    def block(body):
        begun.set()
        assert go_on.wait(WAIT_S)
        return len(body)

    async def main():
        workers, gone = Workers(1, most_open=2), asyncio.Event()

        async def goes():
            await gone.wait()
            return {"type": "http.disconnect"}

        first = asyncio.create_task(workers.read(stays, block, LONG))
        await asyncio.to_thread(begun.wait)
        second = asyncio.create_task(workers.read(goes, read.append, LONG))
        await asyncio.sleep(0)  # it waits in the queue
        with pytest.raises(ApiError, match="too many requests are waiting") as error:
            await workers.read(stays, read.append, LONG)
        assert error.value.code == "queue_full"
        assert await workers.read(stays, len, LONG[:-1]) == SHORT_BYTES  # at once
        gone.set()
        with pytest.raises(ClientGone):
            await second
        third = asyncio.create_task(workers.read(stays, len, LONG))
        go_on.set()
        assert await first == await third == len(LONG)

    asyncio.run(main())
    assert read == []


def test_tokenizing_holds_up_no_completion(monkeypatch):
    begun, go_on = threading.Semaphore(0), threading.Event()

    def tokenize(body, *given):
        begun.release()
        assert go_on.wait(WAIT_S)
        return {}

    monkeypatch.setattr(app, "tokenize", tokenize)
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(LONG)
    )
    with live_server() as server:
        socks = [server.connect() for _ in range(4)]
        for sock in socks:
            sock.sendall(head + LONG)
        assert begun.acquire(timeout=WAIT_S)
        body = json.dumps(completion()).encode() + LONG
        assert server.post("/v1/completions", body).status == 200
        go_on.set()
        assert {read_reply(sock).status for sock in socks} == {200}
