"""Clients that take their time, in either direction."""

import contextlib
import json
import socket

import pytest

from moe_edge.serve import connection
from tests.support.live_server import completion, live_server, read_replies, read_reply

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
HEAD = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@pytest.fixture(scope="module")
def hasty():
    """A server that waits for nobody for long."""
    with live_server(receive_s=0.3, idle_client_s=0.5) as running:
        yield running


@pytest.fixture(scope="module")
def steady():
    """Its limits are short, too, but a busy machine's clients send and read in time."""
    with live_server(receive_s=1.0, idle_client_s=2.0) as running:
        yield running


@pytest.fixture(scope="module")
def patient():
    with live_server(receive_s=600.0, idle_client_s=600.0) as running:
        yield running


def is_closed(sock: socket.socket) -> bool:
    """Whether the server ended a connection; waits for it."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def trickle(sock: socket.socket, piece: bytes) -> None:
    """Sends one piece after another until an answer comes or the end."""
    sock.settimeout(0.05)
    for _ in range(2000):
        try:
            sock.sendall(piece)
            if sock.recv(1, socket.MSG_PEEK) is not None:
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    sock.settimeout(60)


def test_silent_connection_is_closed(hasty):
    assert is_closed(hasty.connect())


@pytest.mark.parametrize("start", [b"P", GET])
def test_half_headers_are_408(hasty, start):
    sock = hasty.connect()
    sock.sendall(start)
    reply = read_reply(sock)
    assert (reply.status, reply.code) == (408, "receive_timeout")
    assert "0.3 s" in reply.json["error"]["message"]
    assert is_closed(sock)


def test_trickled_headers_are_408_however_steadily_they_come(hasty):
    sock = hasty.connect()
    sock.sendall(GET + b"X: ")
    trickle(sock, b"x")
    assert read_reply(sock).code == "receive_timeout"
    assert is_closed(sock)


def test_trickled_body_is_408(hasty):
    sock = hasty.connect()
    sock.sendall(HEAD + b"Content-Length: 5000\r\n\r\n{")
    trickle(sock, b" ")
    assert read_reply(sock).code == "receive_timeout"
    assert is_closed(sock)


def test_body_of_an_answered_request_that_never_ends_is_closed(steady):
    sock = steady.connect()
    sock.sendall(GET + b"Content-Length: 5000\r\n\r\n")
    assert read_reply(sock).status == 200
    trickle(sock, b" ")
    assert is_closed(sock)


def test_connection_is_closed_after_a_body_that_came_after_its_answer(steady):
    sock = steady.connect()
    sock.sendall(GET + b"Content-Length: 2\r\n\r\n")
    assert read_reply(sock).status == 200
    sock.sendall(b"{}")
    assert is_closed(sock)


def test_second_request_of_a_connection_has_its_own_time(steady):
    sock = steady.connect()
    for _ in range(2):
        sock.sendall(GET + b"\r\n")
        assert read_reply(sock).status == 200
    sock.sendall(b"GET /health")
    assert read_reply(sock).code == "receive_timeout"


def test_requests_that_were_sent_at_once_are_all_answered(patient):
    sock = patient.connect()
    request = GET + b"\r\n"
    sock.sendall(request * 3 + b"GET /he")
    assert [reply.status for reply in read_replies(sock, 3)] == [200] * 3
    sock.sendall(b"alth HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert read_reply(sock).status == 200


def test_client_that_goes_after_a_further_request_is_noticed(patient):
    patient.driver.hold()
    sock = patient.send_completion(max_tokens=60)
    patient.until(lambda: patient.thread.num_waiting == 1)
    sock.sendall(b"G")
    sock.close()
    patient.until(lambda: patient.driver.loop.outcomes["cancelled"] == 1)
    patient.driver.let()


def test_connection_that_asks_too_far_ahead_is_cut_off(patient):
    patient.driver.hold()
    cancelled = patient.driver.loop.outcomes["cancelled"]
    sock = patient.send_completion(max_tokens=60)
    patient.until(lambda: patient.thread.num_waiting == 1)
    with contextlib.suppress(ConnectionError):
        sock.sendall((GET + b"\r\n") * 2000)
    assert is_closed(sock)
    patient.until(lambda: patient.driver.loop.outcomes["cancelled"] == cancelled + 1)
    patient.driver.let()


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        GET + b"X: " + b"x" * 100_000,
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_400_in_shape(patient, raw):
    sock = patient.connect()
    sock.sendall(raw)
    reply = read_reply(sock)
    assert (reply.status, reply.code) == (400, "invalid_value")
    assert is_closed(sock)


def test_request_without_a_host_is_not_answered(patient):
    sock = patient.connect()
    sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
    assert read_reply(sock).code == "host_not_allowed"


def test_client_that_stops_reading_is_cut_off_and_its_rows_leave():
    fields = {"logprobs": 20, "max_tokens": 100, "stream": True, "ignore_eos": True}
    body = json.dumps(completion(n=60, **fields)).encode()
    with live_server(receive_s=600.0, idle_client_s=0.5) as server:
        sock = server.connect()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
        )
        server.until(lambda: server.driver.loop.outcomes["cancelled"] > 0)
        server.until(lambda: not server.driver.is_busy)
        assert server.complete().status == 200


def test_client_that_reads_slowly_gets_everything(steady):
    sock = steady.connect()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    fields = {"logprobs": 20, "max_tokens": 100, "ignore_eos": True}
    body = json.dumps(completion(n=4, **fields)).encode()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    reply = read_reply(sock)  # by the small pieces that its buffer holds
    assert len(reply.raw) > 200_000 and len(reply.json["choices"]) == 4


def test_oldest_idle_connection_gives_way_where_there_are_too_many(
    patient, monkeypatch
):
    monkeypatch.setattr(connection, "MOST_CONNECTIONS", 4)
    first = [patient.connect() for _ in range(4)]
    assert patient.get("/health").status == 200
    assert is_closed(first[0])
    first[1].sendall(GET + b"\r\n")
    assert read_reply(first[1]).status == 200


def test_connections_that_wait_for_an_answer_give_way_to_none(monkeypatch):
    monkeypatch.setattr(connection, "MOST_CONNECTIONS", 2)
    with live_server() as server:
        server.driver.hold()
        busy = []
        for count in (1, 2):
            busy.append(server.send_completion())
            server.until(lambda n=count: server.thread.num_waiting == n)
        assert is_closed(server.connect())
        server.driver.let()
        assert {read_reply(sock).status for sock in busy} == {200}
