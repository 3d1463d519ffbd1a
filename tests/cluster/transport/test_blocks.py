"""Connections of blocks that break, stall, lie or belong to strangers."""

import re
import socket
import struct
import threading
import time

import numpy as np
import pytest

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import Address, PeerLost, SecretRefused
from moe_edge.cluster.transport.keys import tls_context
from moe_edge.cluster.transport.messages import blocks
from moe_edge.cluster.transport.messages.stream import hang_up, receive, send
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.cluster.transport.wire import BlockRequest, Kind
from tests.support.cluster_node import Handlers, Node, record

SECRET = b"a secret of the tests"
WAIT_S = 30.0
SIZE = 200_001


@pytest.fixture
def callee():
    with Transport(1, SECRET) as transport:
        transport.serve(Handlers())
        yield transport


@pytest.fixture
def caller(callee):
    with Transport(0, SECRET) as transport:
        transport.lost = []
        transport.on_lost = lambda *what: transport.lost.append(what)
        transport.connect(1, callee.address)
        yield transport


def fetched(transport, block=0, deadline_s=WAIT_S) -> bool:
    """Whether a block comes, as it is."""
    out = np.zeros(SIZE, np.uint8)
    found = transport.fetch(1, 0, block, out, deadline_s)
    return found and np.array_equal(out, record(0, block))


def dial(port: int, secret: bytes = SECRET):
    raw = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    return tls_context(secret, False).wrap_socket(raw)


def streams(callee):
    """Connections of blocks that a process answers at."""
    return callee._answering[1]._open


def eventually(check) -> None:
    until_s = time.monotonic() + WAIT_S
    while not check() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert check()


class Line:
    """Stands between a caller and a callee; `flip` damages large pieces that return."""

    def __init__(self, port: int):
        self._to, self.flip = port, False
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._sockets[0].getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_):
        for one in self._sockets:
            hang_up(one)
            one.close()

    def _run(self):
        while True:
            try:
                here, _ = self._sockets[0].accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += here, there
            for ends in ((here, there, False), (there, here, True)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source, target, back):
        try:
            while data := bytearray(source.recv(1 << 16)):
                data[-1] ^= back and self.flip and len(data) > 4096
                target.sendall(data)
        except OSError:
            pass
        hang_up(target)


def test_a_kept_connection_that_broke_is_made_anew(caller, callee):
    assert fetched(caller)
    for stream in list(streams(callee)):
        hang_up(stream)
    eventually(lambda: not streams(callee))
    assert fetched(caller, 1)
    assert (len(streams(callee)), caller.lost) == (1, [])


def test_fetches_share_a_connection(caller, callee):
    assert fetched(caller) and fetched(caller, 1)
    assert not caller.fetch(1, 1, 0, np.zeros(9, np.uint8), WAIT_S)
    assert fetched(caller, 2) and len(streams(callee)) == 1


def test_damaged_bytes_are_not_taken_for_a_block(caller, callee):
    with Line(callee.address.blocks) as line:
        caller.connect(1, Address("127.0.0.1", callee.address.calls, line.port))
        assert fetched(caller)
        line.flip = True
        for _ in range(2):
            with pytest.raises(
                PeerLost, match="peer 1 gives no blocks: .*BAD_RECORD_M"
            ):
                fetched(caller, 1)
        line.flip = False
        assert fetched(caller, 1)
    assert caller.lost == []


def test_a_port_where_nobody_is_gives_no_blocks(caller, callee):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    caller.connect(1, Address("127.0.0.1", callee.address.calls, port))
    with pytest.raises(PeerLost, match="peer 1 gives no blocks: .*refused") as error:
        fetched(caller)
    assert (error.value.kind, caller.lost) == ("dead", [])


def test_a_port_that_says_nothing_is_overdue(caller, callee):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        caller.connect(1, Address("127.0.0.1", callee.address.calls, port))
        with pytest.raises(PeerLost, match="peer 1 has not answered in time .overdue"):
            fetched(caller, deadline_s=0.05)


def test_a_lost_peer_frees_who_shakes_hands_with_it(caller, callee):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        caller.connect(1, Address("127.0.0.1", callee.address.calls, port))

        def run():
            connection, _ = other.accept()
            caller.disconnect(1)
            with connection:  # until the caller has hung up
                while connection.recv(1 << 12):
                    pass

        thread = threading.Thread(target=run)
        thread.start()
        with pytest.raises(PeerLost, match="peer 1 was disconnected"):
            fetched(caller)
        thread.join()


def test_who_answers_for_a_peer_with_another_secret_is_refused(caller, callee):
    with Transport(1, b"a secret of somebody else") as other:
        other.serve(Handlers())
        ports = callee.address.calls, other.address.blocks
        caller.connect(1, Address("127.0.0.1", *ports))
        with pytest.raises(SecretRefused, match="peer 1 at 127.0.0.1:"):
            fetched(caller)
        eventually(lambda: caller.lost == [(1, "dead")])
        assert other.traffic.received() == {}


def test_a_stranger_gets_no_block(caller, callee):
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        dial(callee.address.blocks, b"a secret of somebody else")
    assert fetched(caller) and {peer for peer, _ in callee.traffic.sent()} == {0}


@pytest.mark.parametrize(
    "frame, text",
    [
        (b"garbage" * 8, "message begins with b'garb', expected b'MoEc'"),
        (wire.encode_text(Kind.ON_ERROR, 0, "x" * 16), "ON_ERROR of 32 bytes at the"),
        (wire.encode_block(0, BlockRequest(0, 0, 0)) + b"\0", "BLOCK of 33 bytes at"),
    ],
)
def test_what_cannot_be_read_is_told_so_and_hung_up_on(caller, callee, frame, text):
    with dial(callee.address.blocks) as stream:
        send(stream, frame)
        (size,) = struct.unpack("<Q", receive(stream, 8))
        refused = receive(stream, size)
        assert wire.read_prefix(refused).kind == Kind.REFUSED
        assert text in wire.decode_text(refused)
        with pytest.raises(OSError):
            receive(stream, 1)
    assert fetched(caller)


@pytest.mark.parametrize(
    "answer, text",
    [
        (b"garbage" * 8, "message begins with b'garb'"),
        (wire.prefix(Kind.RECORD, 99), "RECORD is no answer to what was asked"),
        (wire.prefix(Kind.CALL, 1), "CALL is no answer to what was asked"),
        (wire.prefix(Kind.NOT_HERE, 1) + bytes(3000), "NOT_HERE of 3016 bytes as an"),
        (wire.encode_text(Kind.REFUSED, 0, "a reason"), "reads no more .* a reason"),
    ],
)
def test_a_malformed_answer_loses_the_peer(caller, callee, answer, text):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            raw, _ = listener.accept()
            with tls_context(SECRET, True).wrap_socket(raw, server_side=True) as stream:
                receive(stream, 8 + wire.BLOCK_BYTES)
                send(stream, answer)

        threading.Thread(target=run, daemon=True).start()
        port = listener.getsockname()[1]
        caller.connect(1, Address("127.0.0.1", callee.address.calls, port))
        with pytest.raises(PeerLost, match=f"peer 1 is given up: .*{text}"):
            fetched(caller)
    eventually(lambda: caller.lost == [(1, "dead")])


def test_more_connections_than_may_be_are_closed(caller, callee, monkeypatch):
    assert fetched(caller)
    monkeypatch.setattr(blocks, "MAX_CONNECTIONS", 1)
    with pytest.raises(OSError):
        dial(callee.address.blocks)
    assert fetched(caller, 1)


def test_a_connection_that_cannot_be_accepted_is_not_the_last(monkeypatch):
    accept, failed = blocks.BlockServer._accept, []

    def fail_once(server):
        if not failed:
            failed.append(True)
            raise OSError("too many open files")
        accept(server)

    monkeypatch.setattr(blocks.BlockServer, "_accept", fail_once)
    with Transport(1, SECRET) as callee, Transport(0, SECRET) as caller:
        callee.serve(Handlers())
        caller.connect(1, callee.address)
        assert fetched(caller) and failed


def test_who_does_not_shake_hands_is_hung_up_on(callee, monkeypatch):
    monkeypatch.setattr(blocks, "HANDSHAKE_MS", 1)
    with socket.create_connection(("127.0.0.1", callee.address.blocks)) as stranger:
        stranger.settimeout(WAIT_S)
        assert stranger.recv(1) == b""


def test_a_killed_peer_gives_no_more_blocks():
    with Transport(0, SECRET) as caller, Node(1, SECRET) as node:
        caller.connect(1, node.address)
        assert fetched(caller)
        node.process.kill()
        node.process.wait()
        dead = re.compile(r"peer 1 (gives no blocks|closed the connection).*\(dead\)")
        with pytest.raises(PeerLost, match=dead):
            fetched(caller)


def test_close_ends_all_connections():
    before = threading.active_count()
    with Transport(1, SECRET) as callee, Transport(0, SECRET) as caller:
        callee.serve(Handlers())
        caller.connect(1, callee.address)
        assert fetched(caller)
        port = callee.address.blocks
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            eventually(lambda: len(streams(callee)) == 2)
            callee.close()
            stranger.settimeout(WAIT_S)
            assert stranger.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    assert threading.active_count() <= before
