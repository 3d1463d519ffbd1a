"""What processes say to the scheduler: what is malformed is theirs, a fault is ours."""

import time

import pytest

from moe_edge.cluster.scheduler import serving
from moe_edge.cluster.scheduler.event import SAID, Event
from moe_edge.cluster.scheduler.requests import ClusterRequest, NobodyLeft
from moe_edge.cluster.scheduler.scheduler import Scheduler
from moe_edge.cluster.scheduler.serving import Holders, Serving
from moe_edge.cluster.transport.base import PeerLost
from moe_edge.core import progress
from moe_edge.core.checks import MoeEdgeError, RequestError
from tests.support.live_run import WAIT_S, wait_until

GOOD = {
    "warm": {"seconds": 1.5},
    "ready": {"number": 2},
    "back": {"number": 0},
    "token": {"id": 3, "token": 4, "done": False},
    "failed": {"id": 3, "error": "too long"},
    "lost": {"who": 1, "kind": "dead"},
    "reached": {"who": 1, "reached": True},
    "arrived": {"order": 2, "own": [[1, 5], [2, 0]]},
    "confirmed": {"version": 7},
}


class Nobody:
    """A transport that reaches nobody."""

    def post(self, *told):
        pass

    def disconnect(self, peer):
        pass


@pytest.fixture
def scheduler():
    return Scheduler(Nobody(), None, 2)


def is_well_formed(name, fields):
    return Event(0, name, fields, 0.0).is_well_formed


@pytest.mark.parametrize("name", SAID)
def test_fields_that_are_missing_or_of_another_type_are_malformed(name):
    good = GOOD.get(name, {})
    assert is_well_formed(name, good | {"more": None})
    if "own" not in good:
        assert is_well_formed(name, good | {"own": 5})
    for key, value in good.items():
        without = {k: v for k, v in good.items() if k != key}
        assert not is_well_formed(name, without)
        other = "x" if not isinstance(value, str) else 1
        assert not is_well_formed(name, without | {key: other})
    if name == "reached":
        assert not is_well_formed(name, good | {"reached": 1})
    if name == "token":
        assert not is_well_formed(name, good | {"done": 1})
        assert not is_well_formed(name, good | {"id": True})


@pytest.mark.parametrize("own", [[1], [[1]], [[1, "2"]], [[1, 2, 3]], [[True, 2]]])
def test_blocks_that_are_no_cells_are_malformed(own):
    assert not is_well_formed("arrived", {"order": 2, "own": own})


def test_what_means_nothing_is_refused(scheduler):
    with pytest.raises(RequestError, match="process 2 says 'dance', which means"):
        scheduler.control(2, "dance", {}, {})


def test_malformed_warm_loses_its_server_while_all_start(scheduler, capsys):
    scheduler.control(2, "warm", {"seconds": 1.0}, {})
    scheduler.control(1, "warm", {"seconds": "many"}, {})
    with pytest.raises(NobodyLeft, match="server 0 is hung before all have begun"):
        scheduler.wait_for_all("warm", 5.0, may_lose=False)
    assert "server 0 says 'warm' {'seconds': 'many'}; it is lost" in (
        capsys.readouterr().err
    )
    assert scheduler.alive == [1]


def test_fault_of_ours_in_a_run_is_loud_and_loses_nobody(scheduler):
    holders = Holders()
    holders.actions = {"confirmed": lambda *_: {}["a key of ours"]}
    asked = [ClusterRequest(0, "a", 0, "words", 0.0, [1], 4)]
    scheduler.control(1, "confirmed", {"version": 1}, {})
    with pytest.raises(KeyError, match="a key of ours"):
        Serving(scheduler, holders, asked, None).run()
    assert scheduler.alive == [0, 1]


class Answering(Nobody):
    """A transport to servers that answer or do not, and take orders."""

    def __init__(self, *answering):
        self.answering, self.told, self.posts = answering, [], []

    def post(self, peer, name, fields=None, arrays=None):
        self.told.append((peer - 1, name))
        self.posts.append((peer - 1, name, fields))

    def fetch(self, peer, layer, block, out, deadline_s):
        if peer - 1 not in self.answering:
            raise PeerLost(peer, "hung")
        return False

    def control(self, peer, name, *more, deadline_s):
        if peer - 1 not in self.answering:
            raise PeerLost(peer, "overdue")
        return {}, {}

    def reach(self, peer, within_s):
        return peer - 1 in self.answering


def of(*answering) -> Scheduler:
    return Scheduler(Answering(*answering), None, 3)


def say(scheduler, server, name, **fields):
    scheduler.control(server + 1, name, fields, {})


def told_by(scheduler) -> list:
    return scheduler.transport.told


def next_of(scheduler, wait_s=WAIT_S):
    event = scheduler.next_event(time.monotonic() + wait_s)
    return event and event[:3]


@pytest.mark.parametrize("kind", ["dead", "hung", "overdue", "unanswered", "nonsense"])
def test_accused_servers_that_answer_the_scheduler_stay(kind):
    scheduler = of(0, 1, 2)
    for who in (1, 2, 0, 7, -1):
        say(scheduler, 0, "lost", who=who, kind=kind)
    expected = {"overdue": "slow", "unanswered": "apart"}.get(kind)
    if expected is not None:
        assert [next_of(scheduler)[1] for _ in range(2)] == [expected] * 2
    told = [] if expected else [(0, "reach")] * 2
    wait_until(lambda: next_of(scheduler, 0.01) is None and told == told_by(scheduler))
    assert scheduler.alive == [0, 1, 2]


@pytest.mark.parametrize("kind", ["dead", "hung", "overdue", "unanswered"])
def test_an_accused_server_that_does_not_answer_is_gone(kind):
    scheduler = of(0, 1)
    say(scheduler, 0, "lost", who=2, kind=kind)
    assert next_of(scheduler) == (2, "gone", {"kind": "hung"})
    assert scheduler.lose(2)
    say(scheduler, 0, "lost", who=2, kind=kind)  # that is known
    assert next_of(scheduler, 0.05) is None


@pytest.mark.parametrize("alive", [True, False])
def test_an_accused_whose_blocks_cannot_be_reached_is_asked_otherwise(alive):
    scheduler = of(*((0, 1, 2) if alive else (0, 1)))

    def fetch(peer, *more):
        raise PeerLost(peer, "dead", "gives no blocks: Connection refused")

    scheduler.transport.fetch = fetch
    say(scheduler, 0, "lost", who=2, kind="dead")
    if alive:
        told = [(0, "reach")]
        wait_until(lambda: next_of(scheduler, 0.01) is None and told_by(scheduler))
        assert told_by(scheduler) == told
    else:
        assert next_of(scheduler) == (2, "gone", {"kind": "dead"})


def test_the_schedulers_own_connection_needs_no_question():
    scheduler = of(0, 1, 2)
    scheduler.on_lost(2, "dead")
    assert next_of(scheduler) == (1, "gone", {"kind": "dead"})


def test_what_only_the_scheduler_decides_no_server_can_say():
    scheduler = of(0, 1, 2)
    for name in ("gone", "slow", "apart", "together", "asked", "greeted", "returned"):
        with pytest.raises(RequestError, match=f"says '{name}', which means nothing"):
            say(scheduler, 0, name, who=1, kind="hung")


def order_of(scheduler, server: int) -> int:
    """The number of the last order to return that a server was told."""
    posts = scheduler.transport.posts
    return [f["number"] for n, name, f in posts if (n, name) == (server, "return")][-1]


def test_a_lost_server_is_on_the_list_again_when_it_is_ready(capsys):
    scheduler = of(0, 1, 2)
    say(scheduler, 1, "back", number=0)  # it has noticed before the scheduler has
    assert next_of(scheduler) == (1, "gone", {"kind": "hung"})
    scheduler.lose(1)
    say(scheduler, 1, "ready", number=7)  # of something before
    say(scheduler, 1, "token", id=1, token=2, done=False)
    assert next_of(scheduler, 0.05) is None
    for _ in range(3):
        say(scheduler, 1, "back", number=0)
    assert next_of(scheduler)[:2] == (1, "back")
    scheduler.returning.prepare(1, {"version": 4}, {})
    number = order_of(scheduler, 1)
    say(scheduler, 1, "back", number=number)
    assert next_of(scheduler, 0.05) is None and scheduler.alive == [0, 2]
    say(scheduler, 1, "ready", number=number)
    assert next_of(scheduler)[:2] == (1, "returned")
    assert scheduler.alive == [0, 1, 2]
    told = scheduler.transport.told
    assert told.count((1, "return")) == 1 and {(0, "back"), (2, "back")} <= set(told)
    assert told[-1] == (1, "taken_in")
    assert "server 1 is back, with no blocks" in capsys.readouterr().err


@pytest.mark.parametrize("fields", [{"number": 0}, {"number": 99}, {}])
def test_a_server_that_was_ready_for_something_else_is_not_taken_in(fields):
    scheduler = of(0, 1, 2)
    scheduler.lose(1)
    scheduler.returning.prepare(1, {}, {})
    say(scheduler, 1, "ready", **fields)
    assert next_of(scheduler, 0.05) is None and scheduler.alive == [0, 2]


def test_who_says_that_it_is_back_while_it_is_taken_in_is_not_lost_again():
    scheduler = of(0, 1, 2)
    scheduler.lose(1)
    scheduler.returning.prepare(1, {}, {})
    number = order_of(scheduler, 1)
    say(scheduler, 1, "ready", number=number)
    say(scheduler, 1, "back", number=number)  # before it has heard that it is in
    assert next_of(scheduler)[:2] == (1, "returned")
    assert next_of(scheduler, 0.05) is None and scheduler.alive == [0, 1, 2]
    say(scheduler, 1, "back", number=0)  # it was away once more
    assert next_of(scheduler) == (1, "gone", {"kind": "hung"})


def test_a_server_that_is_lost_while_it_prepares_to_return_is_heard_again():
    scheduler = of(0, 1, 2)
    scheduler.lose(1)
    scheduler.returning.prepare(1, {}, {})
    number = order_of(scheduler, 1)
    scheduler.on_lost(2, "hung")  # process 2 is server 1
    say(scheduler, 1, "ready", number=number)
    say(scheduler, 1, "back", number=number)
    assert next_of(scheduler)[:2] == (1, "back") and scheduler.alive == [0, 2]


def test_all_are_waited_for_by_what_they_say_now():
    scheduler = of(0, 1, 2)
    for server in range(3):
        say(scheduler, server, "ready", number=1)
    for server in (0, 2):
        say(scheduler, server, "ready", number=2)
    with pytest.raises(MoeEdgeError, match=r"servers \[1\] have not said 'ready'"):
        scheduler.wait_for_all("ready", 0.1, number=2)


def test_a_lost_server_that_cannot_be_reached_asks_again():
    scheduler = of(0, 2)
    scheduler.lose(1)
    say(scheduler, 1, "back", number=0)
    assert next_of(scheduler, 0.05) is None
    scheduler.transport.answering = 0, 1, 2
    say(scheduler, 1, "back", number=0)
    assert next_of(scheduler) == (1, "back", {})


def test_a_stranger_that_asks_to_come_back_is_not_heard():
    scheduler = of(0, 1, 2)
    for peer in (0, 4, 99):
        scheduler.control(peer, "back", {"number": 0}, {})
    assert next_of(scheduler, 0.05) is None


def test_a_server_that_is_ready_for_a_run_that_is_over_must_come_back_again():
    scheduler = of(0, 1, 2)
    scheduler.lose(1)
    scheduler.returning.prepare(1, {}, {})
    number = order_of(scheduler, 1)
    scheduler.returning.restart()
    say(scheduler, 1, "ready", number=number)
    assert next_of(scheduler, 0.05) is None and scheduler.alive == [0, 2]
    say(scheduler, 1, "back", number=number)
    assert next_of(scheduler)[:2] == (1, "back")


class Confirming(Holders):
    """Waits for server 0, and when that is lost for server 1."""

    def __init__(self):
        self.unconfirmed, self.lost_at_s = [0], []

    @property
    def under_way(self):
        return bool(self.unconfirmed)

    def lost(self, server):
        self.unconfirmed = [1] if server == 0 else []
        self.lost_at_s.append(time.monotonic())


def test_who_waits_for_what_a_loss_changes_has_its_time(monkeypatch):
    monkeypatch.setattr(serving, "END_S", 0.3)
    scheduler, holders = of(0, 1, 2), Confirming()
    began_s = time.monotonic()
    Serving(scheduler, holders, [], None).run()
    first_s, second_s = holders.lost_at_s
    assert first_s - began_s >= 0.3 and second_s - first_s >= 0.3


class Open(Serving):
    """Serves requests that others bring, for a while."""

    ticks = 0

    @property
    def is_over(self):
        self.ticks += 1
        return self.ticks > 5


def test_a_run_without_requests_of_its_own_reports_no_progress(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    Open(of(0, 1, 2), Holders(), [], None).run()
    assert "requests ended" not in capsys.readouterr().err


def test_each_loss_of_a_server_has_the_time_of_its_own_return():
    scheduler = of(0, 1, 2)
    run = Serving(scheduler, Holders(), [], None)
    for at_s in (10.0, 20.0):
        run._gone(1, {"kind": "hung"}, 0.0)
        scheduler.alive_N[1] = True
        run._returned(1, {}, run.begun_s + at_s)
    assert [f.returned_s for f in run.failures] == pytest.approx([10.0, 20.0])


class Generating(Answering):
    """Servers that make all tokens of a request as soon as they have it."""

    def post(self, peer, name, fields=None, arrays=None):
        if name == "request":
            for left in reversed(range(fields["max_new_tokens"])):
                told = {"id": fields["id"], "token": 1, "done": left == 0}
                self.scheduler.happened(peer - 1, "token", **told)


def test_a_run_looks_at_each_request_a_few_times(monkeypatch):
    """However many there are: else a run's time is quadratic."""
    looks, ended = [], ClusterRequest.ended.fget

    def counted(one):
        looks.append(one.id)
        return ended(one)

    monkeypatch.setattr(ClusterRequest, "ended", property(counted))
    scheduler = Scheduler(Generating(), None, 3)
    scheduler.transport.scheduler = scheduler
    asked = [ClusterRequest(n, "a", n % 3, "words", 0.0, [1], 4) for n in range(60)]
    Serving(scheduler, Holders(), asked, None, passes_on=True).run()
    assert all(len(one.tokens) == 4 and one.done for one in asked)
    assert len(looks) <= 2 * len(asked)
