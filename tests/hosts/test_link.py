"""Messages between processes, and who notices that one is gone."""

import os
import queue
import socket
import sys
import threading
import time

import pytest

from moe_edge.hosts import frames, link
from moe_edge.hosts.link import Link

WAIT_S = 300.0  # for what a loaded machine may take


def pair_of_sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


class Linked:
    """Links of three processes in one, and the lines by which they ended."""

    def __init__(self, monkeypatch, lost_s=30.0):
        monkeypatch.setattr(link, "GRACE_S", 0.1)
        pairs = {number: pair_of_sockets() for number in (1, 2)}
        self.pairs, self.stops = pairs, queue.SimpleQueue()
        self.lost = [queue.SimpleQueue() for _ in range(3)]
        socks = [{number: pair[0] for number, pair in pairs.items()}]
        socks += [{0: pairs[number][1]} for number in (1, 2)]
        self.links = [
            Link(
                number,
                3,
                socks[number],
                on_lost=self.lost[number].put,
                on_stop=lambda: self.stops.put(None),
                beat_s=0.02,
                lost_s=lost_s,
            )
            for number in range(3)
        ]

    def line(self, number: int) -> str:
        return self.lost[number].get(timeout=WAIT_S)

    def end(self) -> None:
        for one in self.links:
            one._closed.set()
        for pair in self.pairs.values():
            for sock in pair:
                sock.close()


@pytest.fixture
def linked(monkeypatch):
    made = Linked(monkeypatch)
    yield made
    made.end()


def test_messages_arrive_in_order(linked):
    first, *others = linked.links
    first.broadcast(b"a")
    first.broadcast(b"x" * 3_000_000)
    for number, other in enumerate(others, 1):
        assert (other.receive(), len(other.receive())) == (b"a", 3_000_000)
        other.send(b"%d" % number)
    assert first.gather() == {1: b"1", 2: b"2"}
    others[0].ask_stop()
    linked.stops.get(timeout=WAIT_S)


def test_an_end_in_order_loses_nobody(linked):
    for one in reversed(linked.links):
        one.close()
    for pair in linked.pairs.values():
        pair[1].shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    assert all(lost.empty() for lost in linked.lost)


def test_a_process_that_is_killed_ends_all_at_once(linked):
    linked.pairs[2][1].shutdown(socket.SHUT_RDWR)
    line = (
        "process 2 has ended without a word: it was killed, or its machine is gone; "
        "start all processes again"
    )
    assert linked.line(0) == line
    assert linked.line(1) == f"process 0 has ended: {line}"


def test_a_process_that_ends_by_an_error_says_which(linked):
    linked.links[1].close("disk full")
    assert linked.line(0) == "process 1 has ended: disk full"
    assert linked.line(2) == "process 0 has ended: process 1 has ended: disk full"


def test_a_process_that_stands_still_is_noticed_by_the_others(monkeypatch):
    linked = Linked(monkeypatch, lost_s=1.5)
    silent = linked.links[2]
    silent._closed.set()  # it beats no more, and its connection stays open
    line = linked.line(0)
    assert line.startswith("process 2 gave no sign of life for 1.5 s: it was stopped")
    assert linked.line(1) == f"process 0 has ended: {line}"
    linked.end()


def test_beats_never_wait_for_a_peer_that_reads_nothing(monkeypatch):
    """Its buffer is full, and a message is stuck: the watch still sees it is silent."""
    ours, theirs = pair_of_sockets()
    lost = queue.SimpleQueue()
    one = Link(0, 2, {1: ours}, on_lost=lost.put, beat_s=0.02, lost_s=0.3)
    stuck = threading.Thread(
        target=one.broadcast, args=[b"x" * 50_000_000], daemon=True
    )
    stuck.start()
    assert "process 1 gave no sign of life" in lost.get(timeout=WAIT_S)
    assert stuck.is_alive()
    theirs.close()
    stuck.join(WAIT_S)
    ours.close()


def test_what_is_no_frame_counts_as_a_lost_process(linked):
    linked.pairs[1][1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert linked.line(0).startswith("process 1 has ended without a word")


def test_end_of_process_is_a_line_and_exit_code_3(monkeypatch, capfd):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    link.end_process("process 1 is gone")
    assert (codes, capfd.readouterr().err) == ([3], "error: process 1 is gone\n")


def test_frame_that_claims_too_much_is_refused():
    ours, theirs = pair_of_sockets()
    with ours, theirs:
        ours.sendall(frames._HEAD.pack(b"moe1", frames.DATA, frames.MOST_BYTES + 1))
        with pytest.raises(frames.FrameError, match="no message of moe_edge"):
            frames.read(theirs)
