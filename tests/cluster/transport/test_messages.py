import concurrent.futures
import errno
import os
import re
import signal
import socket
import threading
import time

import numpy as np
import pytest
import zmq

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import (
    Address,
    Call,
    PeerLost,
    Refused,
    SecretRefused,
)
from moe_edge.cluster.transport.keys import derive_keys, new_secret
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.cluster.transport.wire import Kind, WireError
from moe_edge.core.checks import ConfigError
from tests.support.cluster_node import Handlers, Node, record

SECRET = b"a secret of the tests"
WAIT_S = 30.0  # for what comes at once, on a machine that others load too


def make_call(layer=0, value=1.0, version=0) -> Call:
    return Call(
        layer,
        bucket=2,
        version=version,
        x_TD=np.full((2, 3), value, np.float32),
        token_P=np.array([0, 1, 1], np.uint16),
        block_P=np.array([5, 5, 6], np.uint16),
    )


@pytest.fixture
def handlers():
    return Handlers()


class Gate(threading.Event):
    """Keeps answers back; counts who has come to it."""

    def __init__(self):
        super().__init__()
        self._come = threading.Semaphore(0)

    def hold(self) -> None:
        self._come.release()
        self.wait(6 * WAIT_S)

    def has_come(self, count: int) -> bool:
        """Whether so many more come, for whom it waits."""
        return all(self._come.acquire(timeout=WAIT_S) for _ in range(count))


@pytest.fixture
def gate(handlers):
    """While it is closed, nothing of layer 9 is answered, nor control named `wait`."""
    event = Gate()

    def gated(handle, waits):
        def handler(*args):
            if waits(*args):
                event.hold()
            return handle(*args)

        return handler

    handlers.call = gated(handlers.call, lambda peer, call: call.layer == 9)
    handlers.block = gated(handlers.block, lambda layer, block: layer == 9)
    handlers.control = gated(handlers.control, lambda peer, name, *_: name == "wait")
    yield event
    event.set()


@pytest.fixture
def callee(handlers):
    with Transport(1, SECRET) as transport:
        transport.serve(handlers)
        yield transport


@pytest.fixture
def caller(callee):
    with Transport(0, SECRET) as transport:
        transport.lost = []
        transport.on_lost = lambda peer, kind: transport.lost.append((peer, kind))
        transport.connect(1, callee.address)
        yield transport


def eventually(value, expected) -> None:
    """What another thread brings about in a moment."""
    until_s = time.monotonic() + WAIT_S
    while value() != expected and time.monotonic() < until_s:
        time.sleep(0.01)
    assert value() == expected


def ask(transport, peer=1, deadline_s=WAIT_S, **kwargs):
    ticket = transport.start(peer, make_call(**kwargs))
    return transport.finish([ticket], deadline_s)[0].rows


def test_call_returns_rows(caller):
    np.testing.assert_array_equal(ask(caller, value=3.0), np.full((3, 3), 6.0))


def test_call_of_a_moved_block_returns_none(caller):
    assert ask(caller, layer=1) is None


def test_calls_are_collected_in_any_order(caller):
    tickets = [caller.start(1, make_call(value=float(i))) for i in range(50)]
    order = np.random.default_rng(0).permutation(50)
    assert caller.finish([], WAIT_S) == []
    for part in np.array_split(order, 7):
        answers = caller.finish([tickets[i] for i in part], WAIT_S)
        for i, answer in zip(part, answers, strict=True):
            np.testing.assert_array_equal(answer.rows, np.full((3, 3), 2.0 * i))


def test_large_call_and_rows(caller):
    x_TD = np.random.default_rng(0).normal(size=(128, 1024)).astype(np.float32)
    token_P = np.arange(128, dtype=np.uint16)
    ticket = caller.start(1, Call(0, 128, 0, x_TD, token_P, token_P))
    np.testing.assert_array_equal(caller.finish([ticket], WAIT_S)[0].rows, 2 * x_TD)


def test_error_of_a_handler_reaches_the_caller_only(caller, handlers, capfd):
    def fail(peer, call):
        raise (ValueError if call.layer else ConfigError)(f"no layer\n{call.layer}")

    handlers.call = fail
    with pytest.raises(Refused, match="peer 1: ValueError: no layer$"):
        ask(caller, layer=3)
    assert "ValueError: no layer\n3" in capfd.readouterr().err
    with pytest.raises(Refused, match="peer 1: no layer$"):
        ask(caller, layer=0)
    assert capfd.readouterr().err == ""
    handlers.call = lambda peer, call: call.x_TD.astype(np.float64)
    with pytest.raises(Refused, match="rows are float64.2, 3.") as error:
        ask(caller)
    assert (error.value.peer, caller.lost) == (1, [])
    del handlers.call
    assert ask(caller) is not None


def test_failed_ticket_leaves_the_others(caller, handlers):
    def call(peer, call):
        if call.layer == 4:
            raise ConfigError("no layer 4")
        return Handlers.call(handlers, peer, call)

    handlers.call = call
    good = caller.start(1, make_call())
    bad = caller.start(1, make_call(layer=4))
    last = caller.start(1, make_call(value=2.0))
    with pytest.raises(Refused, match="no layer 4"):
        caller.finish([good, bad, last], WAIT_S)
    assert [a.rows[0, 0] for a in caller.finish([good, last], WAIT_S)] == [2.0, 4.0]


def test_answers_are_stamped_when_they_come_whoever_is_waited_for(caller, gate):
    """The first one is slow; the second one's time must not hold the wait for it."""
    with Transport(2, SECRET) as quick:
        quick.serve(Handlers())
        caller.connect(2, quick.address)
        ask(caller, 2)
        slow = caller.start(1, make_call(layer=9))
        sent_s = time.perf_counter()
        soon = caller.start(2, make_call(value=2.0))
        opened_s = []

        def open_late():
            eventually(lambda: soon in caller._calls._answers, True)
            opened_s.append(time.perf_counter())
            gate.set()

        opener = threading.Thread(target=open_late)
        opener.start()
        (late,) = caller.finish([slow], WAIT_S)
        (early,) = caller.finish([soon], WAIT_S)
        opener.join()
    assert late.at_s > opened_s[0] > early.at_s > sent_s
    assert early.rows[0, 0] == 4.0


def test_overdue_answer_is_not_taken_for_another(caller, gate):
    slow = caller.start(1, make_call(layer=9, value=7.0))
    start_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"peer 1 .* \(overdue\)") as error:
        caller.finish([slow], 0.05)
    assert time.monotonic() - start_s < WAIT_S / 2
    gate.set()
    assert (error.value.peer, error.value.kind) == (1, "overdue")
    np.testing.assert_array_equal(ask(caller, value=1.0), np.full((3, 3), 2.0))
    assert caller.lost == []


def test_control_carries_fields_and_arrays(caller, handlers):
    arrays = {"place": np.arange(6, dtype=np.int32).reshape(2, 3)}
    fields, back = caller.control(1, "hello", {"version": 1}, arrays)
    assert fields == {"peer": 0, "name": "hello", "version": 1}
    np.testing.assert_array_equal(back["place"], arrays["place"])
    assert handlers.seen == [(0, "hello", {"version": 1})]


def test_posts_and_control_come_in_order(caller, handlers):
    for i in range(200):
        caller.post(1, "post", {"i": i})
    caller.control(1, "last", {"i": 200})
    assert [fields["i"] for _, _, fields in handlers.seen] == list(range(201))


def test_a_post_that_is_refused_leaves_a_line(caller, handlers, capfd):
    def refuse(peer, name, fields, arrays):
        raise ConfigError("no such\norder")

    handlers.control = refuse
    caller.post(1, "dance")
    with pytest.raises(Refused):
        caller.control(1, "last")
    assert capfd.readouterr().err == "'dance' of process 0: no such order\n"


def test_control_by_many_threads_gets_its_own_answer(caller):
    wrong = []

    def run(thread):
        for i in range(30):
            fields, _ = caller.control(1, "x", {"id": [thread, i]})
            wrong.extend([fields] if fields["id"] != [thread, i] else [])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_control_refused_and_overdue(caller, handlers, gate):
    with pytest.raises(PeerLost, match="overdue"):
        caller.control(1, "wait", deadline_s=0.05)
    gate.set()

    def control(peer, name, fields, arrays):
        raise ConfigError("another checkpoint")

    handlers.control = control
    with pytest.raises(Refused, match="^peer 1: another checkpoint$"):
        caller.control(1, "hello")
    with pytest.raises(WireError, match="hello: its fields are no JSON"):
        caller.control(1, "hello", {"x": object()})


@pytest.mark.parametrize("size", [1, 65536, 200_001])
def test_fetch_copies_the_record(caller, handlers, size):
    handlers.block = lambda layer, block: record(layer, block, size)
    out = np.zeros(size, np.uint8)
    assert caller.fetch(1, 0, 9, out, WAIT_S)
    np.testing.assert_array_equal(out, record(0, 9, size))


def test_fetch_into_rows_of_another_type(caller, handlers):
    source = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32)
    handlers.block = lambda layer, block: source
    out = np.zeros((2, 30, 7), np.float32)
    assert caller.fetch(1, 0, 0, out[1], WAIT_S)
    np.testing.assert_array_equal(out, [np.zeros_like(source), source])
    with pytest.raises(ConfigError, match=r"float32\[30, 3\] with gaps"):
        caller.fetch(1, 0, 0, out[0, :, :3], WAIT_S)


def test_fetch_asks_for_a_record_once(caller, handlers):
    asked = []
    handlers.block = lambda *block: asked.append(block) or record(*block)
    assert caller.fetch(1, 0, 3, np.zeros(200_001, np.uint8), WAIT_S)
    assert asked == [(0, 3)]


def test_fetch_of_a_moved_block_is_false(caller):
    assert not caller.fetch(1, 1, 0, np.zeros(200_001, np.uint8), WAIT_S)
    assert caller.fetch(1, 0, 0, np.zeros(200_001, np.uint8), WAIT_S)


def test_fetch_of_another_size_is_refused(caller, handlers, capfd):
    with pytest.raises(Refused, match="record has 200001 bytes, expected 100"):
        caller.fetch(1, 0, 0, np.zeros(100, np.uint8), WAIT_S)
    handlers.block = lambda layer, block: 1 / 0
    with pytest.raises(Refused, match="peer 1: ZeroDivisionError"):
        caller.fetch(1, 0, 0, np.zeros(100, np.uint8), WAIT_S)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_fetches_by_two_threads_do_not_mix(caller):
    outs = np.zeros((8, 200_001), np.uint8)

    def run(first):
        for block in range(first, 8, 2):
            caller.fetch(1, 0, block, outs[block], WAIT_S)

    thread = threading.Thread(target=run, args=(1,))
    thread.start()
    run(0)
    thread.join()
    np.testing.assert_array_equal(outs, [record(0, block) for block in range(8)])


def test_calls_go_before_blocks(caller, gate):
    # A fetch that cannot move on: calls and control do not stand behind it.
    out = np.zeros(200_001, np.uint8)
    thread = threading.Thread(target=caller.fetch, args=(1, 9, 0, out, 6 * WAIT_S))
    thread.start()
    for i in range(100):
        np.testing.assert_array_equal(ask(caller, value=float(i))[0, 0], 2 * i)
    caller.control(1, "x")
    assert thread.is_alive() and not out.any()
    gate.set()
    thread.join()
    np.testing.assert_array_equal(out, record(9, 0))


def test_overdue_fetch_does_not_spoil_the_next(caller, gate):
    out = np.zeros(200_001, np.uint8)
    with pytest.raises(PeerLost, match="overdue"):
        caller.fetch(1, 9, 1, out, 0.05)
    gate.set()
    assert caller.fetch(1, 0, 2, out, WAIT_S)
    np.testing.assert_array_equal(out, record(0, 2))


def test_traffic_sent_is_received(caller, callee):
    for i in range(3):
        ask(caller, layer=i % 2)
    caller.post(1, "p")
    caller.control(1, "c", {}, {"a": np.zeros(100)})
    caller.fetch(1, 0, 0, np.zeros(200_001, np.uint8), WAIT_S)
    for one, other in ((caller, callee), (callee, caller)):
        sent = {kind: count for (_, kind), count in one.traffic.sent().items()}
        got = {kind: count for (_, kind), count in other.traffic.received().items()}
        assert sent == got
    assert caller.traffic.sent()[1, Kind.CALL] == (3, 3 * (40 + 24 + 12))
    assert caller.traffic.received()[1, Kind.ROWS] == (2, 2 * (24 + 36))
    assert caller.traffic.received()[1, Kind.NOT_HERE] == (1, 16)
    assert caller.traffic.received()[1, Kind.RECORD] == (1, 16 + 200_001)
    assert {kind for _, kind in callee.traffic.received()} == {
        Kind.CALL,
        Kind.POST,
        Kind.CONTROL,
        Kind.BLOCK,
    }
    caller.traffic.reset()
    assert (caller.traffic.sent(), caller.traffic.received()) == ({}, {})


def test_disconnect_forgets_a_peer(caller, callee, gate):
    slow = caller.start(1, make_call(layer=9))
    threading.Timer(0.05, caller.disconnect, [1]).start()
    start_s = time.monotonic()
    with pytest.raises(PeerLost, match="peer 1 was disconnected"):
        caller.finish([slow], WAIT_S)
    assert time.monotonic() - start_s < WAIT_S / 2
    gate.set()
    for refused in (
        lambda: caller.start(1, make_call()),
        lambda: caller.control(1, "x"),
        lambda: caller.fetch(1, 0, 0, np.zeros(9, np.uint8), WAIT_S),
    ):
        with pytest.raises(PeerLost, match="peer 1 is not connected"):
            refused()
    caller.post(1, "nobody hears it")
    caller.disconnect(1)
    caller.connect(1, callee.address)
    assert ask(caller) is not None
    assert caller.lost == []


def test_reach_is_true_of_a_connected_peer_and_keeps_its_connection(caller, gate):
    """Also while it computes."""
    slow = caller.start(1, make_call(layer=9))
    link = caller._links[1]
    assert caller.reach(1, WAIT_S)
    assert caller._links[1] is link and caller.lost == []
    gate.set()
    assert caller.finish([slow], WAIT_S)[0].rows is not None


@pytest.mark.parametrize("how", ["lost", "disconnected"])
def test_reach_connects_to_a_lost_peer_again(caller, how):
    if how == "lost":
        caller._watch.lose(caller._links[1], lambda: PeerLost(1, "hung"))
        with pytest.raises(PeerLost, match="hung"):
            ask(caller)
        eventually(lambda: caller.lost, [(1, "hung")])
    else:
        caller.disconnect(1)
    assert caller.reach(1, WAIT_S)
    assert ask(caller) is not None
    with pytest.raises(Refused, match="200001 bytes"):  # blocks, too
        caller.fetch(1, 0, 0, np.zeros(9, np.uint8), WAIT_S)
    assert caller.lost == [(1, "hung")] * (how == "lost")


def test_reach_gives_up_in_time_and_may_succeed_later(caller, callee, handlers):
    address = callee.address
    callee.close()
    eventually(lambda: caller.lost, [(1, "dead")])
    started_s = time.monotonic()
    assert not caller.reach(1, 0.2)
    assert time.monotonic() - started_s < WAIT_S / 2
    with pytest.raises(PeerLost, match="peer 1 is not connected"):
        ask(caller)
    again = Transport(1, SECRET, "127.0.0.1", address.calls, address.blocks)
    with again:
        again.serve(handlers)
        assert caller.reach(1, WAIT_S)
        assert ask(caller) is not None
    assert not caller.reach(7, 0.1)  # nobody ever said where it is


def test_only_a_peer_that_has_ended_refuses(caller, callee, monkeypatch):
    assert not caller.refuses(1)
    callee.close()
    assert caller.refuses(1)
    assert not caller.refuses(7)  # nobody ever said where it is

    def no_network(*_):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", no_network)
    assert not caller.refuses(1)


def test_a_connection_that_two_threads_miss_is_made_once(caller, monkeypatch):
    made, connect = [], caller.connect

    def noted(peer, address):
        time.sleep(0.05)  # the other one has seen the same loss
        connect(peer, address)
        made.append(caller._links[peer])

    monkeypatch.setattr(caller, "connect", noted)
    caller._watch.lose(caller._links[1], lambda: PeerLost(1, "hung"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(caller.reach, (1, 1), (WAIT_S, WAIT_S))) == [True, True]
    assert len(made) == 1 and ask(caller) is not None


def test_who_gives_up_waiting_leaves_a_newer_connection(caller, callee, monkeypatch):
    first, sleep, newer = caller._links[1], time.sleep, []
    first.state = "connecting"  # it never is ready

    def other(_):
        """Another thread connects again when the time is just over."""
        sleep(0.1)
        caller.connect(1, callee.address)
        newer.append(caller._links[1])

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", other)
        caller.reach(1, 0.05)
    assert [caller._links.get(1)] == newer
    assert ask(caller) is not None


def test_a_peer_that_another_thread_gives_up_is_not_reached(caller, monkeypatch):
    connect = caller.connect

    def connect_in_vain(peer, address):
        connect(peer, address)
        caller.disconnect(peer)

    monkeypatch.setattr(caller, "connect", connect_in_vain)
    caller.disconnect(1)
    assert not caller.reach(1, WAIT_S)


def test_disconnect_frees_threads_that_wait(caller, gate):
    errors = []

    def run(wait):
        try:
            wait()
        except PeerLost as error:
            errors.append(str(error))

    out = np.zeros(9, np.uint8)
    waits = [
        lambda: caller.control(1, "wait", deadline_s=WAIT_S),
        lambda: caller.fetch(1, 9, 0, out, WAIT_S),
    ]
    threads = [threading.Thread(target=run, args=(wait,)) for wait in waits]
    for thread in threads:
        thread.start()
    assert gate.has_come(len(waits))
    start_s = time.monotonic()
    caller.disconnect(1)
    for thread in threads:
        thread.join()
    assert time.monotonic() - start_s < WAIT_S / 2
    assert errors == ["peer 1 was disconnected (dead)"] * 2


def test_wrong_secret_is_refused_at_once(callee):
    with Transport(2, b"a secret of somebody else") as stranger:
        lost = []
        stranger.on_lost = lambda peer, kind: lost.append((peer, kind))
        stranger.connect(1, callee.address)
        start_s = time.monotonic()
        where = re.escape(f"127.0.0.1:{callee.address.calls}")
        with pytest.raises(SecretRefused, match=f"peer 1 at {where} refused the hand"):
            stranger.control(1, "hello", deadline_s=WAIT_S)
        assert time.monotonic() - start_s < WAIT_S / 2
        with pytest.raises(SecretRefused):
            stranger.start(1, make_call())
        eventually(lambda: lost, [(1, "dead")])


def raw_dealer(context, address: Address, client: bytes, server: bytes, identity):
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvtimeo = int(1000 * WAIT_S)
    keys = derive_keys(server).server, derive_keys(client).client
    dealer.curve_serverkey = keys[0].public
    dealer.curve_publickey, dealer.curve_secretkey = keys[1].public, keys[1].secret
    dealer.routing_id = identity
    dealer.connect(f"tcp://127.0.0.1:{address.calls}")
    return dealer


def test_client_with_another_key_is_not_admitted(callee, handlers):
    # It knows the server's public key, but not the secret.
    with zmq.Context() as context:
        args = (context, callee.address, b"another secret x", SECRET, b"c" * 13)
        with raw_dealer(*args) as dealer:
            dealer.send(wire.prefix(Kind.NOT_HERE, 0))
            assert not dealer.poll(300)
    assert callee.traffic.received() == {}


@pytest.mark.parametrize(
    "frames, text",
    [
        ([b"garbage" * 9], "message begins with b'garb'"),
        ([wire.prefix(Kind.ROWS, 3)], "ROWS at the port of calls"),
        ([wire.prefix(Kind.CALL, 3)], "CALL of 16 bytes, expected 40"),
        ([wire.prefix(Kind.NOT_HERE, 3)] * 2, "2 frames, expected 1"),
    ],
)
def test_malformed_message_bans_its_sender_only(caller, callee, frames, text):
    call = wire.encode_call(1, make_call())
    with zmq.Context() as context:
        args = (context, callee.address, SECRET, SECRET, b"c" + b"\0" * 12)
        with raw_dealer(*args) as dealer:
            dealer.send(call)
            assert wire.read_prefix(dealer.recv()).kind == Kind.ROWS
            dealer.send_multipart(frames)
            refused = dealer.recv()
            assert wire.read_prefix(refused).kind == Kind.REFUSED
            assert text in wire.decode_text(refused)
            dealer.send(call)
            assert not dealer.poll(300)
    assert ask(caller) is not None


def test_nameless_sender_is_banned(callee):
    with zmq.Context() as context:
        args = (context, callee.address, SECRET, SECRET, b"nameless")
        with raw_dealer(*args) as dealer:
            dealer.send(wire.encode_call(1, make_call()))
            assert wire.decode_text(dealer.recv()) == "a name of 8 bytes"


def test_random_bytes_at_the_ports_change_nothing(caller, callee):
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(size) for size in (1, 10, 64, 1000, 100_000)]
    pieces.append(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    pieces.append(b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48) + rng.bytes(200))
    for port in (callee.address.calls, callee.address.blocks):
        for piece in pieces:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                try:
                    stranger.sendall(piece)
                except ConnectionError:
                    pass  # refused before all was sent
        assert ask(caller) is not None
    assert caller.fetch(1, 0, 0, np.zeros(200_001, np.uint8), WAIT_S)
    assert {peer for peer, _ in callee.traffic.received()} == {0}
    assert caller.lost == []


@pytest.mark.parametrize(
    "answer, text",
    [
        (b"garbage" * 9, "message begins with b'garb'"),
        (wire.prefix(Kind.CALL, 1), "CALL is no answer to what was asked"),
        (wire.encode_text(Kind.REFUSED, 0, "a reason"), "reads no more .* a reason"),
    ],
)
def test_malformed_answer_loses_the_peer(caller, answer, text):
    keys = derive_keys(SECRET).server
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = int(1000 * WAIT_S)
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys.public, keys.secret
        port = router.bind_to_random_port("tcp://127.0.0.1")
        caller.connect(2, Address("127.0.0.1", port, port))
        ticket = caller.start(2, make_call())
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, answer])
        with pytest.raises(PeerLost, match=f"peer 2 is given up: .*{text}") as error:
            caller.finish([ticket], WAIT_S)
        assert error.value.kind == "dead"
        assert ask(caller) is not None
    eventually(lambda: caller.lost, [(2, "dead")])


def test_port_in_use_is_refused(callee):
    for name, port in (("calls", callee.address.calls), ("blocks", 1)):
        if name == "blocks":
            with socket.create_server(("127.0.0.1", 0)) as other:
                port = other.getsockname()[1]
                refuse(f"127.0.0.1:{port}: it is in use", blocks_port=port)
        else:
            refuse(f"127.0.0.1:{port}: it is in use", calls_port=port)


@pytest.mark.parametrize(
    "text, kwargs",
    [
        ("10.255.255.1:0: this machine has no such address", {"host": "10.255.255.1"}),
        ("host 'no.such.host.invalid' has no", {"host": "no.such.host.invalid"}),
        ("host '0.0.0.0' stands for every address", {"host": "0.0.0.0"}),
    ],
)
def test_settings_out_of_range_are_refused(text, kwargs):
    refuse(text, **kwargs)


def refuse(text, **kwargs):
    with pytest.raises(ConfigError, match=re.escape(text)):
        Transport(0, SECRET, **kwargs)


def test_close_is_quick_and_may_be_repeated(callee, handlers, gate):
    before = threading.active_count()
    caller = Transport(0, SECRET)
    caller.connect(1, callee.address)
    caller.serve(handlers)
    ask(caller)
    waiting = caller.start(1, make_call(layer=9))
    timer = threading.Timer(0.05, caller.close)
    timer.start()
    with pytest.raises(PeerLost, match="disconnected"):
        caller.finish([waiting], WAIT_S)
    timer.join()
    start_s = time.monotonic()
    caller.close()
    caller.close()
    assert time.monotonic() - start_s < WAIT_S / 2
    assert threading.active_count() <= before  # others may end meanwhile


def test_close_does_not_wait_for_a_stuck_handler(caller, callee, gate):
    caller.start(1, make_call(layer=9))
    assert gate.has_come(1)
    start_s = time.monotonic()
    callee.close()
    assert time.monotonic() - start_s < WAIT_S / 2


def test_last_posts_are_sent_before_the_end(callee, handlers):
    caller = Transport(0, SECRET)
    caller.connect(1, callee.address)
    caller.control(1, "x")
    for i in range(20):
        caller.post(1, "bye", {"i": i})
    caller.close()
    eventually(lambda: [f["i"] for _, _, f in handlers.seen[1:]], list(range(20)))


def test_tickets_never_collected_are_forgotten(caller, monkeypatch):
    monkeypatch.setattr("moe_edge.cluster.transport.messages.calls.MAX_OPEN", 10)
    for _ in range(30):
        ticket = caller.start(1, make_call())
    assert caller.finish([ticket], WAIT_S)[0].rows is not None
    assert len(caller._calls._open) + len(caller._calls._answers) <= 20


def test_killed_peer_is_dead_at_once():
    with Transport(0, SECRET) as caller, Node(1, SECRET) as node:
        assert not node.jax_loaded
        lost = []
        caller.on_lost = lambda *what: lost.append(what)
        caller.connect(1, node.address)
        assert ask(caller) is not None
        ticket = caller.start(1, make_call(layer=3, version=10_000))
        errors = []

        def wait():
            try:
                while True:
                    caller.control(1, "x", deadline_s=WAIT_S)
            except PeerLost as error:
                errors.append(error.kind)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        node.process.kill()
        with pytest.raises(PeerLost, match=r"closed the connection \(dead\)"):
            caller.finish([ticket], WAIT_S)
        thread.join()
        assert errors == ["dead"]
        for again in (lambda: ask(caller), lambda: caller.control(1, "x")):
            with pytest.raises(PeerLost, match="dead"):
                again()
        eventually(lambda: lost, [(1, "dead")])


def test_a_peer_is_not_dead_because_there_is_no_network(monkeypatch):
    """To connect again fails at once then, as it does where nobody listens."""

    def no_network(*_):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", no_network)
    with Transport(0, SECRET) as caller, Node(1, SECRET) as node:
        lost = []
        caller.on_lost = lambda *what: lost.append(what)
        caller.connect(1, node.address)
        assert ask(caller) is not None
        node.process.kill()
        eventually(lambda: lost, [(1, "hung")])


def test_stopped_peer_hangs_but_a_busy_one_does_not():
    with (
        Transport(0, SECRET, hung_s=2.0) as caller,
        Node(1, SECRET) as stopped,
        Node(2, SECRET) as busy,
    ):
        lost = []
        caller.on_lost = lambda *what: lost.append(what)
        for peer, node in ((1, stopped), (2, busy)):
            caller.connect(peer, node.address)
            assert ask(caller, peer) is not None
        # Compiling may hold Python's lock; ZeroMQ's thread answers heartbeats.
        start_s = time.monotonic()
        long = caller.start(2, make_call(layer=2, version=4000))
        os.kill(stopped.process.pid, signal.SIGSTOP)
        os.waitpid(stopped.process.pid, os.WUNTRACED)  # until it has
        ticket = caller.start(1, make_call())
        with pytest.raises(PeerLost, match=r"not answered heartbeats \(hung\)"):
            caller.finish([ticket], WAIT_S)
        eventually(lambda: lost, [(1, "hung")])
        assert caller.finish([long], WAIT_S)[0].rows is not None
        assert time.monotonic() - start_s > 3.9
        assert lost == [(1, "hung")]


def test_secret_of_a_run_serves_processes():
    secret = new_secret()
    with Transport(0, secret) as caller, Node(3, secret) as node:
        caller.connect(3, node.address)
        fields, _ = caller.control(3, "hello")
        assert fields == {"peer": 0, "name": "hello"}
