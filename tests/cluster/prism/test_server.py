"""What a server answers to orders, calls and rubbish, and how it ends."""

import contextlib
import os
import socket
import threading

import numpy as np
import pytest

from moe_edge.cluster.drills import Drill
from moe_edge.cluster.node.node import SchedulerLost
from moe_edge.cluster.transport.base import Call, PeerLost, Refused
from moe_edge.cluster.transport.messages.transport import Transport
from tests.support.live_cluster import (
    SLOTS,
    LiveCluster,
    Wandering,
    assert_tokens_of_one_machine,
    random_held,
    requests,
)
from tests.support.live_nodes import SECRET, WAIT_S

WIDTH = 40  # of the tiny model


@pytest.fixture
def cluster():
    with LiveCluster([SLOTS] * 2) as cluster:
        yield cluster


@pytest.fixture
def stranger(cluster):
    """A process that knows the secret, but is no part of the cluster."""
    with Transport(9, SECRET) as transport:
        transport.connect(1, cluster.servers[0].transport.address)
        transport.connect(0, cluster.transport.address)
        yield transport


def call_of(layer=1, block=0, tokens=1, version=0, width=WIDTH) -> Call:
    return Call(
        layer=layer,
        bucket=tokens,
        version=version,
        x_TD=np.ones((tokens, width), np.float32),
        token_P=np.arange(tokens, dtype=np.uint16),
        block_P=np.full(tokens, block, np.uint16),
    )


def ask(transport, call: Call):
    return transport.finish([transport.start(1, call)], 20.0)[0].rows


@pytest.mark.parametrize(
    "call, text",
    [
        (call_of(layer=0), r"layer 0, block 0, expected one of layers \[1, 2\]"),
        (call_of(layer=7), "layer 7, block 0"),
        (call_of(block=12), "layer 1, block 12, expected .* below 12"),
        (call_of(block=int(random_held(2)[0, 0].argmax()), width=3), "3"),
    ],
)
def test_a_call_that_cannot_be_is_refused_and_the_server_goes_on(
    cluster, stranger, call, text
):
    run = cluster.run(random_held(2), requests((9,), 4, 1))
    with pytest.raises(Refused, match=text):
        ask(stranger, call)
    assert_tokens_of_one_machine(run.asked)
    assert_tokens_of_one_machine(
        cluster.run(random_held(2, 1), requests((9,), 4, 1)).asked
    )


def test_a_call_of_a_block_that_is_elsewhere_is_not_answered(cluster, stranger):
    held_NLE = random_held(2)
    cluster.run(held_NLE, requests((9,), 4, 1))
    here, there = (int(held_NLE[n, 0].argmax()) for n in range(2))
    assert ask(stranger, call_of(block=here)).shape == (1, WIDTH)
    assert ask(stranger, call_of(block=there)) is None
    # A caller that goes by a newer table knows better: nobody has the block.
    assert ask(stranger, call_of(block=there, version=5)).shape == (1, WIDTH)
    assert not cluster.servers[0].server.holdings.held_LE[1, there]


def test_only_the_scheduler_gives_orders(cluster, stranger):
    for name in ("stop", "drop", "table", "strike", "notes"):
        with pytest.raises(Refused, match="process 9 gives no orders"):
            stranger.control(1, name, {"kind": "kill"}, {"cells": np.zeros((1, 2))})


def test_what_strangers_tell_the_scheduler_changes_nothing(cluster, stranger):
    asked = requests((9, 16), 12, 2)
    hello = OnFirstToken(
        lambda: [
            stranger.post(0, "token", {"id": 0, "token": 1, "done": True}),
            stranger.post(0, "lost", {"who": 0, "kind": "dead"}),
            stranger.post(0, "confirmed", {"version": 0}),
            stranger.post(0, "nonsense"),
        ]
    )
    cluster.scheduler.react = hello
    run = cluster.run(random_held(2), asked)
    assert_tokens_of_one_machine(run.asked)
    assert hello.done and not run.failures


class OnFirstToken:
    def __init__(self, act):
        self.act, self.done = act, False

    def __call__(self, way, server, name, fields):
        if name == "token" and not self.done:
            self.done = True
            self.act()


def test_an_order_that_cannot_be_read_is_refused(cluster, capsys):
    for name, fields in (("table", {}), ("drop", {}), ("strike", {"kind": "tickle"})):
        with pytest.raises(Refused, match="KeyError"):
            cluster.transport.control(1, name, fields)
    run = cluster.run(random_held(2), requests((9,), 4, 1))
    assert_tokens_of_one_machine(run.asked)
    assert "KeyError" in capsys.readouterr().err


def test_random_bytes_at_all_ports_change_nothing(cluster):
    asked, stop = requests((9, 16, 5, 12), 24, 2), threading.Event()
    rng = np.random.default_rng(0)
    addresses = [one.transport.address for one in cluster.servers]
    addresses.append(cluster.transport.address)
    ports = [port for where in addresses for port in (where.calls, where.blocks)]
    sent = []

    def shout():
        while not stop.is_set():
            for port in ports:
                with socket.create_connection(("127.0.0.1", port)) as stream:
                    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE"
                    start = greeting if rng.random() < 0.5 else b""
                    stream.sendall(start + rng.bytes(int(rng.integers(1, 5000))))
                    sent.append(port)

    shouting = threading.Thread(target=shout)
    shouting.start()
    try:
        run = cluster.run(random_held(2), asked)
    finally:
        stop.set()
        shouting.join()
    assert_tokens_of_one_machine(run.asked)
    assert not run.failures and set(sent) == set(ports)


def test_a_server_without_its_scheduler_ends_in_the_midst_of_a_step():
    with LiveCluster([SLOTS] * 2) as cluster:
        waiting, over = threading.Event(), threading.Event()
        server = cluster.servers[1].server

        def never(peer, call):
            waiting.set()
            over.wait(WAIT_S)

        server.call = never

        def run():
            with contextlib.suppress(AttributeError):  # see below
                cluster.run(random_held(2), requests((9,), 40, 1))

        one = threading.Thread(target=run, daemon=True)
        one.start()
        assert waiting.wait(WAIT_S)
        cluster.transport.close()
        over.set()
        for each in cluster.servers:
            each.join()
        errors = [each.error for each in cluster.servers]
        assert all(isinstance(error, SchedulerLost) for error in errors)
        assert {error.exit_code for error in errors} == {3}
        for each in cluster.servers:
            each.error, each.killed = None, True
        cluster.scheduler._events.put("no event")  # ends the thread by a fault
        one.join(WAIT_S)
        assert not one.is_alive()


def test_what_the_thread_that_brings_blocks_dies_of_ends_the_server(cluster):
    read = cluster.servers[1].server.holdings.blocks.read
    broken = threading.Event()

    def fails(layer, block):
        if broken.is_set():
            raise OSError("the disk is gone")
        return read(layer, block)

    for one in cluster.servers:
        one.server.holdings.blocks.read = fails if one.me == 1 else read
    held_NLE = np.stack([random_held(1)[0], np.zeros((2, 12), bool)])
    held_NLE[0, 0, :6], held_NLE[1, 0, :6] = False, True
    asked = requests((9, 16), 24, 2)
    react = OnFirstToken(broken.set)
    cluster.scheduler.react = react
    cluster.hold(asked[-1], {("to", "lost"): 1})
    cluster.audit.expect = False
    goal_NLE = held_NLE[::-1].copy()
    run = cluster.run(held_NLE, asked, policy=Wandering([held_NLE, goal_NLE], 0.01))
    assert_tokens_of_one_machine(run.asked)
    assert [(f.server, f.kind) for f in run.failures] == [(1, "dead")]
    cluster.servers[1].join()
    assert str(cluster.servers[1].error) == "the disk is gone"
    cluster.servers[1].error = None


def test_a_drill_strikes_the_server_that_is_told(monkeypatch, cluster):
    struck = []
    monkeypatch.setattr(os, "kill", lambda pid, number: struck.append((pid, number)))
    type(cluster.scheduler).__mro__[1].strike(cluster.scheduler, Drill("kill", 1, 1))
    cluster.transport.control(2, "time")
    assert struck == [(os.getpid(), 9)]
    with pytest.raises(PeerLost):
        cluster.transport.control(7, "time")
