"""Long bodies wait for each other, not for who is gone; nobody waits for them."""

import asyncio
import contextlib
import json
import threading

import pytest

from moe_edge.serve import app
from moe_edge.serve.errors import ApiError
from moe_edge.serve.generation import SHORT_BYTES, Workers
from moe_edge.serve.guards import ClientGone
from tests.support.live_server import WAIT_S, completion, live_server, read_reply

LONG = b" " * (SHORT_BYTES + 1)
SOON_S = 60.0  # for what nothing holds up


async def stays():
    await asyncio.Event().wait()


def test_who_goes_makes_room_and_is_never_read():
    begun, go_on, read = threading.Event(), threading.Event(), []

    def block(body):
        begun.set()
        assert go_on.wait(WAIT_S)
        return len(body)

    async def main():
        workers = Workers("bodies", 1, most_bytes=2 * len(LONG))
        gone = asyncio.Event()

        async def goes():
            await gone.wait()
            return {"type": "http.disconnect"}

        first = asyncio.create_task(workers.read(stays, block, LONG))
        await asyncio.to_thread(begun.wait)
        assert workers.has_room(LONG) and not workers.has_room(LONG + b" ")
        second = asyncio.create_task(workers.read(goes, read.append, LONG))
        await asyncio.sleep(0)  # it waits in the queue
        assert not workers.has_room(LONG) and workers.has_room(LONG[:-1])
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
        assert workers.has_room(LONG * 2)

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


@contextlib.contextmanager
def held_bodies(server, monkeypatch, count: int, size: int = 3000):
    """So many long bodies, none of which is read before the end: their sockets."""
    go_on, kind = threading.Event(), type(server.model.tokenizer)
    encode = kind.encode_batch

    def slow(tokenizer, texts, **options):
        if texts == ["held"]:
            assert go_on.wait(WAIT_S)
        return encode(tokenizer, texts, **options)

    monkeypatch.setattr(kind, "encode_batch", slow)
    # `user` is ignored; the text itself is short.
    body = completion(prompt="held", user="")
    body["user"] = "x" * (size - len(json.dumps(body)))
    socks = [server.send_completion(**body) for _ in range(count)]
    try:
        server.until(lambda: server.thread._coming == count)
        yield socks
    finally:
        go_on.set()


def test_long_answers_come_while_bodies_wait_to_be_read(monkeypatch):
    """Answers are written by threads that no body keeps from it."""
    with (
        live_server() as server,
        held_bodies(server, monkeypatch, 5) as held,
    ):
        for stream in (False, True):
            # 200 tokens in all: more than is written at once.
            asked = {"n": 2, "max_tokens": 100, "ignore_eos": True, "stream": stream}
            sock = server.send_completion(**asked, logprobs=3)
            sock.settimeout(SOON_S)
            reply = read_reply(sock)
            assert reply.status == 200
        assert reply.events[-1] == "[DONE]"
        assert server.get("/health").json["status"] == "ok"
        held[-1].close()  # it is never read
        server.until(lambda: server.thread._coming == 4)
    assert server.thread.summary()["outcomes"]["finished"] == 4


def test_bodies_on_their_way_are_bounded_by_size_and_short_ones_still_come(
    monkeypatch,
):
    most = app.MOST_BODIES
    with live_server(max_body="4KiB") as server:
        with held_bodies(server, monkeypatch, most, 4096) as held:
            for _ in range(2):
                refused = server.complete(user="x" * 3000)
                assert (refused.status, refused.code) == (429, "queue_full")
                assert int(refused.headers["retry-after"]) > 0
            assert server.complete().status == 200
            assert server.seen.refusals == ["/v1/completions"] * 2
        assert {read_reply(sock).status for sock in held} == {200}
        assert server.complete(user="x" * 3000).status == 200
        summary = server.thread.summary()
    assert summary["outcomes"]["refused"] == 2
    assert summary["requests"] == most + 4


def test_bodies_on_their_way_count_as_rows_that_wait(monkeypatch):
    with live_server(max_waiting=2) as server:  # and two run
        with held_bodies(server, monkeypatch, 3) as held:
            assert server.complete().status == 200
            assert server.complete(n=2).code == "queue_full"
            last = server.send_completion(prompt="held", user="x" * 3000)
            server.until(lambda: server.thread._coming == 4)
            assert server.complete().code == "queue_full"
        assert {read_reply(sock).status for sock in [*held, last]} == {200}
        assert server.thread._coming == 0
        assert server.thread.summary()["outcomes"]["refused"] == 3


def test_text_too_long_for_any_tokens_is_refused_before_it_is_encoded(monkeypatch):
    with live_server() as server:
        sizes, kind = [], type(server.model.tokenizer)
        encode = kind.encode_batch

        def noted(tokenizer, texts, **options):
            sizes.append(max(map(len, texts)))
            return encode(tokenizer, texts, **options)

        monkeypatch.setattr(kind, "encode_batch", noted)
        most = server.model.longest_text
        for route, field in (
            ("completions", "prompt"),
            ("chat/completions", "messages"),
        ):
            for length in (most, most + 1):
                text = "é" * (length // 2) + "a" * (length % 2)
                value = [{"role": "user", "content": text}]
                body = {field: text if field == "prompt" else value, "max_tokens": 1}
                reply = server.post(f"/v1/{route}", body)
                assert (reply.status, reply.code) == (400, "context_length_exceeded")
                assert reply.json["error"]["param"] == field
                message = reply.json["error"]["message"]
        # One: a chat has words around its text.
        assert len(sizes) == 1 and "bytes, which are more than 128 tokens" in message
