"""Hellos: who is taken in, who is refused, and who is missing."""

import threading

import pytest

from moe_edge.cluster.node.membership import Reception, say_hello
from moe_edge.cluster.roles import SCHEDULER
from moe_edge.cluster.transport.base import Address, PeerLost
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import ConfigError
from tests.support.live_run import WAIT_S, unused_ports

SECRET = b"a secret of the tests"
FACTS = {
    "wire": 1,
    "content": {"a.bin": "abc", "b.bin": "def"},
    "jaxlib": "0.10",
    "options": {"servers": 2, "slots": "9,9", "hung_s": 10.0},
}


class Answers:
    """A scheduler that only takes hellos."""

    def __init__(self, reception):
        self._reception = reception

    def control(self, peer, name, fields, arrays):
        return self._reception.hello(peer, fields), {}


@pytest.fixture
def reception():
    return Reception(FACTS, processes=3)


@pytest.fixture
def where(reception):
    with Transport(SCHEDULER, SECRET) as transport:
        transport.serve(Answers(reception))
        yield Address("127.0.0.1", transport.address.calls, transport.address.calls)


def hello(where, process: int, secret: bytes = SECRET, timeout_s=WAIT_S, **changes):
    facts = FACTS | {"instance": f"i{process}", "address": []} | changes
    with Transport(process, secret) as transport:
        say_hello(transport, where, facts, timeout_s, lambda *_: None)


def test_all_that_fit_are_taken_in_in_any_order(reception, where):
    threads = [threading.Thread(target=hello, args=(where, n)) for n in (2, 1)]
    for thread in threads:
        thread.start()
    members = reception.wait(WAIT_S)
    assert sorted(members) == [1, 2] and members[2]["instance"] == "i2"
    for thread in threads:
        thread.join()
    hello(where, 1)  # an answer was late: it asks again
    assert sorted(reception.wait(0.1)) == [1, 2]


@pytest.mark.parametrize(
    "process, changes, text",
    [
        (1, {"wire": 2}, "process 1 has wire 2, the scheduler 1; start all with the"),
        (
            *(1, {"content": {"a.bin": "abc", "b.bin": "xyz"}}),
            r"process 1 has another b.bin in its --checkpoint than the scheduler "
            r"\(SHA-256 xyz, there def\); give all processes the same checkpoint",
        ),
        (
            *(1, {"content": {"b.bin": "def"}}),
            "the --checkpoint of the scheduler has a.bin, that of process 1 has not;",
        ),
        (1, {"jaxlib": "0.9"}, "process 1 has jaxlib '0.9', the scheduler '0.10'"),
        (
            1,
            {"options": FACTS["options"] | {"slots": "8,8"}},
            "process 1 has --slots 8,8, the scheduler 9,9; start all with the same",
        ),
        (1, {"options": {}}, "process 1 has --servers None, the scheduler 2"),
        (3, {}, "process 3 is none of 1 to 2; give another --process_id"),
        (2, {"instance": "new"}, "process 2 is there already; give another"),
    ],
)
def test_who_does_not_fit_is_refused(reception, where, process, changes, text):
    hello(where, 2)
    with pytest.raises(ConfigError, match=text):
        hello(where, process, **changes)
    assert list(reception.members) == [2]
    with pytest.raises(ConfigError, match=r"processes \[1\] have not come within 0.1"):
        reception.wait(0.1)


def test_another_secret_is_refused(reception, where):
    with pytest.raises(ConfigError, match="give all processes the same --secret_file"):
        hello(where, 1, b"another secret of the tests")
    assert not reception.members


def test_without_a_scheduler_the_hello_ends_in_time():
    (port,) = unused_ports(1)
    with pytest.raises(ConfigError, match=f"no scheduler at 127.0.0.1:{port} within"):
        hello(Address("127.0.0.1", port, port), 1, timeout_s=0.3)


class Failing:
    """A transport whose first hello fails; who answers the second is lost meanwhile."""

    def __init__(self):
        self.attempts, self.on_lost = 0, None

    def connect(self, peer, address):
        self.attempts += 1

    def control(self, peer, name, fields, deadline_s):
        self.on_lost(peer, "hung" if self.attempts == 1 else "dead")
        if self.attempts == 1:
            raise PeerLost(peer, "hung")


def test_loss_of_the_scheduler_is_told_from_the_hello_on_that_succeeded():
    transport, lost = Failing(), []
    say_hello(transport, Address("x", 1, 1), {}, 5.0, lambda *what: lost.append(what))
    assert transport.attempts == 2 and lost == [(SCHEDULER, "dead")]
    transport.on_lost(SCHEDULER, "hung")
    assert lost[1:] == [(SCHEDULER, "hung")]
