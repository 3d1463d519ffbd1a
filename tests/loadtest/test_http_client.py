"""A client over plain sockets, against answers byte by byte."""

import asyncio

import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.loadtest.http_client import Client, HttpError, message_of, parse_url


def talk(function, *answers):
    """What an async function of a client finds where a server gives these answers.

    Args:
      answers: a connection's each: bytes for every request of it; then it closes.
    """
    heads, left = [], list(answers)

    async def serve(reader, writer):
        for answer in left.pop(0):
            try:
                heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            except asyncio.IncompleteReadError:
                break
            for byte in (answer[i : i + 7] for i in range(0, len(answer), 7)):
                writer.write(byte)
                await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(parse_url(f"http://127.0.0.1:{port}/base/"), "secret")
        try:
            return await function(client)
        finally:
            await client.close()
            server.close()

    return asyncio.run(main()), heads


JSON = b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}'


async def twice(client):
    return [await client.get_json("GET", "/x") for _ in range(2)]


def test_a_connection_is_used_again():
    found, heads = talk(twice, [JSON, JSON])
    assert found == [{"a": 1}, {"a": 1}]
    assert heads[0].startswith("GET /base/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "Authorization: Bearer secret\r\n" in heads[1]


def test_a_connection_that_was_closed_meanwhile_is_replaced():
    assert talk(twice, [JSON], [JSON])[0] == [{"a": 1}, {"a": 1}]
    closing = JSON.replace(b"Content", b"Connection: close\r\nContent")
    assert talk(twice, [closing], [closing])[0] == [{"a": 1}, {"a": 1}]
    without_length = b'HTTP/1.0 200 OK\r\n\r\n{"a": 1}'
    assert talk(twice, [without_length], [without_length])[0] == [{"a": 1}] * 2


def test_events_come_in_any_pieces():
    async def events(client):
        async with client.request("POST", "/x", b"{}") as answer:
            found = [event async for event in answer.events()]
            assert answer.status == 200 and answer.keeps_alive
            return found

    data = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\ndata:two\n\ndata: [DONE]\n\n'
    parts = [data[:20], data[20:21], data[21:]]
    chunks = b"".join(b"%x;q=1\r\n%b\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    found, _ = talk(events, [head + chunks + b"0\r\nTrailer: x\r\n\r\n"])
    assert found == [b'{"a": 1}', b"two", b"[DONE]"]


@pytest.mark.parametrize(
    "answer, error, message",
    [
        (b"SSH-2.0-x\r\n", HttpError, "answer begins with 'SSH-2.0-x', expected HTTP"),
        (b"HTTP/1.1 abc\r\n\r\n", HttpError, "status of an answer is 'abc'"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno",
            HttpError,
            "answer b'no' is not valid JSON",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            HttpError,
            "size of a chunk of an answer is 'zz'",
        ),
        (b"HTTP/1.1 200 " + b"a" * (1 << 17), HttpError, "has a line of over "),
        (
            b'HTTP/1.1 401 No\r\nContent-Length: 26\r\n\r\n{"error":{"message":"no"}}',
            RequestError,
            "/x: 401 no",
        ),
        (b"", ConnectionError | asyncio.IncompleteReadError, "."),
    ],
)
def test_other_answers_are_refused(answer, error, message):
    kinds = getattr(error, "__args__", error)
    with pytest.raises(kinds, match=message):
        talk(lambda client: client.get_json("GET", "/x"), [answer])


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a?b=1"]
)
def test_urls_that_are_none_are_refused(url):
    with pytest.raises(ConfigError, match="expected such as http://127.0.0.1:8000"):
        parse_url(url)


def test_message_of_an_error_is_found():
    assert message_of({"error": {"message": "x"}}) == "x"
    assert message_of(["y"]) == "['y']" and message_of({"error": "z"}).endswith("'z'}")
