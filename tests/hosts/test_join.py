"""Processes find each other: threads stand for them."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_edge.core.checks import MoeEdgeError
from moe_edge.hosts import frames
from moe_edge.hosts.join import meet
from moe_edge.hosts.place import Place
from tests.support.live_run import WAIT_S, unused_ports

TOLD = {"jax_port": 7}


def place(port: int, index: int, count: int = 2) -> Place:
    return Place("127.0.0.1", port, index, count)


def join(places, timeout_s: float = WAIT_S) -> list:
    """What `meet` gave or raised in each process."""

    def one(which):
        try:
            return meet(which, timeout_s, lambda: TOLD)
        except MoeEdgeError as error:
            return f"{error.exit_code}: {error}"

    with ThreadPoolExecutor(len(places)) as pool:
        return [*pool.map(one, places)]


@pytest.fixture
def port() -> int:
    return unused_ports(1)[0]


def close(found) -> None:
    for socks, _ in found:
        for sock in socks.values():
            sock.close()


def test_three_processes_meet_though_another_program_knocks(port):
    def knock():
        for word in (b"GET / HTTP/1.1\r\n\r\n", frames.pack_json(frames.HELLO, [1])):
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port)) as sock:
                        sock.sendall(word)
                    break
                except OSError:
                    continue

    thread = threading.Thread(target=knock)
    thread.start()
    first = ThreadPoolExecutor(1).submit(meet, place(port, 0, 3), WAIT_S, lambda: TOLD)
    thread.join()  # both have knocked before the others come
    found = [first, *join([place(port, i, 3) for i in (2, 1)])]
    found[0] = first.result()
    assert [told for _, told in found] == [TOLD] * 3
    assert [sorted(socks) for socks, _ in found] == [[1, 2], [0], [0]]
    close(found)


def test_processes_that_disagree_are_all_refused(port):
    line = (
        "2: process 1 was started with --num_processes 3, process 0 with 2; give all "
        "the same"
    )
    assert join([place(port, 0), place(port, 1, 3)]) == [line] * 2


def test_two_processes_of_one_number_are_refused(port):
    found = join([place(port, index, 3) for index in (0, 1, 1)])
    line = "2: two processes have --process_id 1; give each its own, from 0 to 2"
    assert found == [line] * 3


def test_a_process_that_does_not_come_is_named_to_all(port):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, [place(port, 1, 3)])
        # Long enough for the other one, which tries ten times a second.
        found = [*join([place(port, 0, 3)], 1.5), *other.result()]
    line = (
        "3: process 2 of 3 did not come within 1.5 s (--join_timeout_s); start it with "
        f"--coordinator 127.0.0.1:{port}"
    )
    assert found == [line, line]


def test_a_coordinator_that_does_not_answer_is_named_with_its_timeout(port):
    (line,) = join([place(port, 1)], 0.2)
    assert line == (
        f"3: --coordinator 127.0.0.1:{port} did not answer process 1 within 0.2 s "
        "(--join_timeout_s): Connection refused; is process 0 running there, and can "
        "this machine reach it?"
    )


def test_another_program_at_the_coordinators_port_is_named(port):
    with socket.create_server(("127.0.0.1", port)) as server:

        def answer():
            sock, _ = server.accept()
            sock.recv(100)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.close()

        threading.Thread(target=answer, daemon=True).start()
        (line,) = join([place(port, 1)])
    assert line.startswith(
        f"2: --coordinator 127.0.0.1:{port} is another program (what"
    )


def test_a_port_that_is_taken_and_an_unknown_host_are_named(port):
    with socket.create_server(("127.0.0.1", port)):
        (line,) = join([place(port, 0)])
    assert line.startswith(f"2: --coordinator 127.0.0.1:{port} cannot be listened on: ")
    (line,) = join([Place("no.such.host.invalid", 7, 0, 2)])
    assert line.startswith("2: --coordinator no.such.host.invalid:7: no such host")
