"""Losses, slowness and errors while requests are served: tokens stay the same."""

import dataclasses
import functools
import math
import threading
import time

import numpy as np
import pytest

from moe_edge.cluster.drills import Drill
from moe_edge.cluster.node import way_back
from moe_edge.cluster.node.node import Order, SchedulerLost
from moe_edge.cluster.node.remote import last_deadline_s
from moe_edge.cluster.prism.table_keeper import TableKeeper
from moe_edge.cluster.roles import FIRST
from moe_edge.cluster.scheduler.requests import NobodyLeft
from tests.support.live_cluster import (
    BLOCKS,
    READY_S,
    SLOTS,
    LiveCluster,
    OnNth,
    Wandering,
    assert_tokens_of_one_machine,
    random_held,
    requests,
)
from tests.support.live_nodes import lose_way
from tests.support.live_run import wait_until
from tests.support.slow_cases import slow

LENGTHS, NEW = (9, 16, 12, 5), 24


def asked_of(servers: int):
    return requests(LENGTHS, NEW, servers)


def owned_by_one(servers: int) -> np.ndarray:
    """bool [N, L, E]: every block once, equally shared."""
    owner_LE = (np.arange(BLOCKS) * servers // BLOCKS).reshape(2, -1)
    return owner_LE == np.arange(servers)[:, None, None]


@pytest.mark.parametrize(
    "way, name, count",
    [
        *slow(("from", "token", 10)),  # before any round
        ("to", "bring", 2),  # blocks of a round are on their way
        *slow(("from", "arrived", 2)),  # of some servers of a round
        *slow(("to", "table", 2)),  # a table goes out
        ("from", "confirmed", 4),  # by some, in the second round
        *slow(("to", "drop", 3)),  # by all
    ],
)
def test_a_server_that_dies_around_a_migration_changes_no_token(way, name, count):
    tables, asked = [random_held(3, seed) for seed in range(4)], asked_of(3)
    with LiveCluster([SLOTS] * 3) as cluster:
        cluster.scheduler.react = OnNth(way, name, count, lambda: cluster.kill(1))
        cluster.hold(asked[-1], {("to", "lost"): 1, ("from", "arrived"): 1})
        run = cluster.run(tables[0], asked, policy=Wandering(tables, 0.02))
        assert_tokens_of_one_machine(run.asked)
        (failure,) = run.failures
        assert (failure.server, failure.kind) == (1, "dead")
        assert failure.resumed_s > failure.detected_s
        assert run.keeper.table.moved and not run.keeper.degraded


def test_a_moved_request_brings_the_tokens_that_it_has():
    with LiveCluster([SLOTS] * 3) as cluster:
        cluster.kill_after(1, 3)
        run = cluster.run(random_held(3), asked_of(3))
        assert_tokens_of_one_machine(run.asked)
        moved = [one for one in run.asked if one.home == 1]
        assert moved and all(one.at == 2 for one in moved)
        talk = cluster.scheduler.talk
        asked = [t for t in talk if t[:3] == ("to", 2, "request")]
        known = [fields["known"] for *_, fields in asked if fields["id"] == moved[0].id]
        told = [
            fields["token"]
            for way, server, name, fields in talk
            if (way, server, name) == ("from", 1, "token")
            and fields["id"] == moved[0].id
        ]
        assert known == [told] and len(told) == 3
        # Nobody told a known token again.
        assert len(moved[0].times_s) == NEW
        (failure,) = run.failures
        assert failure.detected_s < failure.resumed_s
        # Others' tokens in between do not count as its going on.
        assert failure.resumed_s == moved[0].times_s[len(told)] - run.begun_s


def test_blocks_of_a_dead_server_get_free_slots():
    held_NLE, asked = owned_by_one(3), asked_of(3)
    with LiveCluster([SLOTS] * 3) as cluster:
        cluster.hold(asked[-1], {("from", "arrived"): 2})  # of both that are left
        run = cluster.run(held_NLE, asked, drill=Drill("kill", 0, 8))
        assert_tokens_of_one_machine(run.asked)
        first, second = run.keeper.table.changes
        assert sorted(first.drops) == [
            (0, *c) for c in np.argwhere(held_NLE[0]).tolist()
        ]
        assert sorted(m[1:] for m in second.moves) == [
            d[1:] for d in sorted(first.drops)
        ]
        assert {m[0] for m in second.moves} == {1, 2} and not run.keeper.degraded
        for one in cluster.servers[1:]:
            there_LE = one.server.holdings.held_LE[1:]
            np.testing.assert_array_equal(there_LE, run.keeper.held_NLE[one.me])


def test_without_room_lost_blocks_are_read_for_each_call():
    with LiveCluster([9, 9, 9]) as cluster:  # 8 blocks each, a spare slot
        run = cluster.run(owned_by_one(3), asked_of(3), drill=Drill("kill", 0, 8))
        assert_tokens_of_one_machine(run.asked)
        assert len(run.keeper.degraded) == 8 and not run.keeper.table.moved
        assert [run.notes[n][0]["most_used"] for n in (1, 2)] == [9, 9]


def test_a_server_without_slots_asks_others_for_lost_blocks():
    with LiveCluster([0, 9, 9, 9]) as cluster:
        held_NLE = np.concatenate([np.zeros((1, 2, 12), bool), owned_by_one(3)])
        run = cluster.run(held_NLE, asked_of(4), drill=Drill("kill", 1, 8))
        assert_tokens_of_one_machine(run.asked)
        assert len(run.keeper.degraded) == 8
        assert run.notes[0][0]["local_pairs"] == 0


@pytest.mark.parametrize(
    "name, count", [("bring", 3), *slow(("table", 4), ("drop", 1))]
)
def test_a_loss_in_a_round_that_fills_all_survivors_is_read_at_once(name, count):
    """Who is in the midst of a step confirms nothing, so nothing may wait for that."""
    start_NLE = owned_by_one(3)
    goal_NLE, asked = np.roll(start_NLE, 1, axis=0), asked_of(3)
    with LiveCluster([10, 10, 10], table_s=60.0) as cluster:
        react = OnNth("to", name, count, lambda: cluster.kill(0))
        cluster.scheduler.react = react
        cluster.hold(asked[-1], {("to", "lost"): 1})
        policy = Wandering([start_NLE, goal_NLE], 0.02)
        run = cluster.run(start_NLE, asked, policy=policy)
        assert_tokens_of_one_machine(run.asked)
        assert react.left <= 0 and run.keeper.degraded
        (failure,) = run.failures
        assert failure.resumed_s - failure.detected_s < 30.0  # else table_s


def test_servers_may_die_one_after_the_other():
    with LiveCluster([SLOTS] * 4) as cluster:
        kills = iter([2, 0, 3])
        tokens, asked = iter(range(1000)), asked_of(4)
        asked[-1].arrival_s = math.inf
        holdings = cluster.servers[1].server.holdings

        def react(way, server, name, fields):
            if (way, name) == ("from", "token") and next(tokens) in (8, 24, 40):
                cluster.kill(next(kills))
            if (way, server, name) == ("from", 1, "arrived"):
                if holdings.held_LE[1:].all():  # all that it will ever bring
                    asked[-1].arrival_s = 0.0

        cluster.scheduler.react = react
        run = cluster.run(random_held(4, copies=0.2), asked)
        assert_tokens_of_one_machine(run.asked)
        assert [f.server for f in run.failures] == [2, 0, 3]
        assert {one.at for one in run.asked} == {1}
        assert run.keeper.held_NLE[1].all() and not run.keeper.degraded


def test_two_servers_may_die_at_once():
    with LiveCluster([SLOTS] * 3) as cluster:

        def kill():
            cluster.kill(0)
            cluster.kill(2)

        cluster.scheduler.react = OnNth("from", "token", 8, kill)
        run = cluster.run(random_held(3), asked_of(3))
        assert_tokens_of_one_machine(run.asked)
        assert sorted(f.server for f in run.failures) == [0, 2]


def test_without_servers_the_run_ends_with_one_line():
    with LiveCluster([SLOTS] * 2) as cluster:

        def kill():
            cluster.kill(0)
            cluster.kill(1)

        cluster.scheduler.react = OnNth("from", "token", 8, kill)
        with pytest.raises(NobodyLeft, match="all servers are lost") as caught:
            cluster.run(random_held(2), asked_of(2))
        assert caught.value.exit_code == 3


def test_without_slots_on_the_servers_left_the_run_ends_with_one_line():
    with LiveCluster([0, SLOTS]) as cluster:
        held_NLE = random_held(1)
        held_NLE = np.concatenate([~held_NLE, held_NLE])
        with pytest.raises(
            NobodyLeft, match=r"servers \[0\] are left and have no slot"
        ):
            cluster.run(held_NLE, asked_of(2), drill=Drill("kill", 1, 8))


def test_a_slow_server_is_asked_again_and_stays_on_the_list():
    with LiveCluster([SLOTS] * 2, call_s=0.2) as cluster:
        server = cluster.servers[1].server
        compute, slow = server.call, iter([0.5, 0.5])

        def call(peer, question):
            time.sleep(next(slow, 0.0))
            return compute(peer, question)

        server.call = call
        tables = [random_held(2, seed) for seed in range(3)]
        run = cluster.run(tables[0], asked_of(2), policy=Wandering(tables, 0.02))
        assert_tokens_of_one_machine(run.asked)
        assert not run.failures
        assert [t for t in cluster.scheduler.talk if t[:3] == ("from", 1, "slow")]


def test_a_call_longer_than_its_deadline_succeeds_and_kills_nobody(monkeypatch):
    """It lasts until the server has been judged, and each attempt may last longer."""
    judged, repeat = threading.Event(), TableKeeper.repeat

    def judge(keeper):
        repeat(keeper)
        judged.set()

    monkeypatch.setattr(TableKeeper, "repeat", judge)
    with LiveCluster([SLOTS] * 2, call_s=0.1) as cluster:
        server, caller = cluster.servers[1].server, cluster.servers[0].transport
        compute, finish, deadlines_s = server.call, caller.finish, []

        def call(peer, question):
            judged.wait(READY_S)
            return compute(peer, question)

        def noted(tickets, deadline_s):
            deadlines_s.append(deadline_s)
            return finish(tickets, deadline_s)

        server.call, caller.finish = call, noted
        run = cluster.run(owned_by_one(2), requests((5,), 2, 2))
        assert_tokens_of_one_machine(run.asked)
        assert not run.failures and run.keeper.table.changes
        assert deadlines_s[1] > deadlines_s[0] == 0.1


def test_a_call_that_is_never_answered_loses_the_server_and_no_request():
    """Though the scheduler asks the accused for longer than tables otherwise take."""
    with LiveCluster([SLOTS] * 2, call_s=0.01, table_s=0.5) as cluster:
        stuck, tables, waits_s = threading.Event(), cluster.servers[0].server.tables, []
        newer = tables.newer

        def patient(version, wait_s):
            """How long it would wait; the machine may be slower."""
            waits_s.append(wait_s)
            return newer(version, READY_S)

        tables.newer = patient
        cluster.servers[1].server.call = lambda *_: stuck.wait()
        run = cluster.run(owned_by_one(2), requests((5,), 2, 2))
        stuck.set()
        assert {*waits_s} == {0.5 + last_deadline_s(0.01)}
        assert_tokens_of_one_machine(run.asked)
        assert [(f.server, f.kind) for f in run.failures] == [(1, "hung")]


def test_tokens_have_the_time_at_which_they_came():
    with LiveCluster([SLOTS]) as cluster:
        next_event = cluster.scheduler.next_event

        def later(until_s):
            event = next_event(until_s)
            return event and event._replace(at_s=event.at_s + 1000)

        cluster.scheduler.next_event = later
        run = cluster.run(random_held(1), requests((5,), 4, 1))
        assert all(t - run.begun_s > 1000 for t in run.asked[0].times_s)


def test_blocks_that_do_not_come_are_read_from_the_own_checkpoint():
    tables = [random_held(2, seed) for seed in range(3)]
    with LiveCluster([SLOTS] * 2) as cluster:
        for one in cluster.servers:
            one.transport.fetch = lambda *_: False
        policy, asked = Wandering(tables, 0.02, source="network"), asked_of(2)
        cluster.hold(asked[-1], {("to", "table"): 1})
        run = cluster.run(tables[0], asked, policy=policy)
        assert_tokens_of_one_machine(run.asked)
        assert run.keeper.table.moved
        assert all((run.notes[n][1]["brought"][:, 4] == -1).all() for n in (0, 1))
        for change in run.keeper.table.changes:
            assert [m[0] for m in change.moves] == list(change.sources)


@pytest.mark.parametrize("fields", [{}, {"id": 0, "token": "one", "done": False}])
def test_a_server_that_says_nonsense_is_lost(fields, capsys):
    with LiveCluster([SLOTS] * 2) as cluster:
        control = cluster.scheduler.control
        nonsense = functools.partial(control, 1, "token", fields, {})
        cluster.scheduler.react = OnNth("from", "token", 4, nonsense)
        run = cluster.run(random_held(2), asked_of(2))
        assert_tokens_of_one_machine(run.asked)
        assert [f.server for f in run.failures] == [0]
        cluster.audit.expect = False
    assert "server 0 says 'token'" in capsys.readouterr().err


def test_notes_that_a_living_server_does_not_give_are_named(capsys):
    with LiveCluster([SLOTS] * 2) as cluster:
        server = cluster.servers[1].server
        server.orders["notes"] = Order(lambda *_: {}["nothing"])
        run = cluster.run(random_held(2), asked_of(2))
        assert_tokens_of_one_machine(run.asked)
        assert run.notes_missing == [1] and set(run.notes) == {0}
    assert "servers [1] gave no notes" in capsys.readouterr().err


def test_the_error_of_a_request_ends_that_request_only():
    with LiveCluster([SLOTS] * 2) as cluster:
        asked = asked_of(2)
        asked[1] = dataclasses.replace(asked[1], max_new_tokens=5000)
        asked[2] = dataclasses.replace(asked[2], prompt=(1, 999))
        run = cluster.run(random_held(2), asked)
        assert_tokens_of_one_machine([run.asked[0], run.asked[3]])
        assert "exceed" in run.asked[1].error and "999" in run.asked[2].error
        assert not any(one.done for one in run.asked[1:3]) and not run.failures


def test_a_fault_in_a_request_ends_that_request_only(monkeypatch, capsys):
    with LiveCluster([SLOTS] * 2) as cluster:
        engine = cluster.servers[1].server.engine
        prefill = engine.prefill

        def broken(session, prompts):
            if len(prompts[0]) == LENGTHS[1]:
                raise RuntimeError("out of memory")
            return prefill(session, prompts)

        monkeypatch.setattr(engine, "prefill", broken)
        run = cluster.run(random_held(2), asked_of(2))
        assert_tokens_of_one_machine([one for one in run.asked if one.id != 1])
        assert run.asked[1].error == "RuntimeError: out of memory"
    assert "Traceback" in capsys.readouterr().err


def test_requests_arrive_when_they_are_due():
    with LiveCluster([SLOTS] * 2) as cluster:
        asked = requests(LENGTHS, 4, 2, at_s=0.15)
        run = cluster.run(random_held(2), asked)
        assert_tokens_of_one_machine(run.asked)
        late_s = [one.arrived_s - run.begun_s - one.arrival_s for one in run.asked]
        assert min(late_s) >= 0


def test_two_requests_take_turns():
    with LiveCluster([SLOTS] * 2, max_batch=2) as cluster:
        server = cluster.servers[0].server

        request = server.orders["request"].later

        def late(fields, arrays):
            if fields["id"] == 0:  # until the other one has come
                wait_until(lambda: not server._waiting.empty())
            request(fields, arrays)

        server.orders["request"] = Order(later=late)
        run = cluster.run(random_held(2), asked_of(2))
        assert_tokens_of_one_machine(run.asked)
        order = [
            fields["id"]
            for way, server, name, fields in cluster.scheduler.talk
            if (way, server, name) == ("from", 0, "token")
        ]
        assert order == [0, 2] * NEW


def test_a_server_that_was_lost_before_the_run_is_known_to_it():
    with LiveCluster([SLOTS] * 3) as cluster:
        cluster.kill_after(1, 3)
        cluster.run(random_held(3), asked_of(3))
        run = cluster.run(random_held(3, 1), asked_of(3))
        assert_tokens_of_one_machine(run.asked)
        assert not run.failures and not run.keeper.start_NLE[1].any()
        assert run.keeper.start_NLE.any(axis=0).all() and not run.keeper.table.changes


@pytest.mark.parametrize("heard", ["first", "last"])
def test_a_server_that_dies_while_a_run_is_prepared_is_replaced(heard):
    with LiveCluster([SLOTS] * 3) as cluster:
        count = {"first": 1, "last": 3}[heard]
        cluster.scheduler.react = OnNth("from", "ready", count, lambda: cluster.kill(1))
        run = cluster.run(random_held(3), asked_of(3))
        assert_tokens_of_one_machine(run.asked)
        assert [f.server for f in run.failures] == [1]


def pause(cluster, server: int) -> None:
    """What a pause, or an outage of its network, does: all its connections break."""
    cluster.audit.watching = cluster.audit.expect = False
    one, number = cluster.servers[server], FIRST + server
    for other in (cluster, *cluster.servers):
        if other is not one:
            lose_way(other.transport, number)
            lose_way(one.transport, other.transport.peer)


@pytest.mark.parametrize("how", ["paused", "misjudged"])
def test_a_server_that_is_lost_and_lives_comes_back_empty(how, capfd):
    with LiveCluster([SLOTS] * 3) as cluster:
        lose = {
            "paused": lambda: pause(cluster, 1),
            "misjudged": lambda: cluster.scheduler.on_lost(FIRST + 1, "hung"),
        }
        cluster.scheduler.serving = lambda: None  # blocks are lost: no audit
        cluster.scheduler.react = OnNth("from", "token", 8, lose[how])
        asked = requests((*LENGTHS, 9), NEW, 3)
        cluster.hold(asked[-1], {("from", "returned"): 1})  # its home is server 1
        run = cluster.run(owned_by_one(3), asked)
        assert_tokens_of_one_machine(run.asked)
        (failure,) = run.failures
        assert (failure.server, failure.kind) == (1, "hung")
        assert failure.returned_s > failure.detected_s
        assert cluster.scheduler.alive == [0, 1, 2] and asked[-1].home == 1
        assert run.asked[-1].made_by == [1] * NEW  # it serves again
        assert run.keeper.held_NLE.any(axis=0).all()
        for one in cluster.servers:
            there_LE = one.server.holdings.held_LE[1:]
            np.testing.assert_array_equal(there_LE, run.keeper.held_NLE[one.me])
    assert "server 1 is back, with no blocks" in capfd.readouterr().err


@pytest.mark.slow
def test_a_server_that_comes_back_takes_blocks_that_found_no_room():
    with LiveCluster([9, 9, 9]) as cluster:
        react = OnNth("from", "token", 8, lambda: pause(cluster, 1))
        cluster.scheduler.react = react
        asked = asked_of(3)
        cluster.hold(asked[-1], {("from", "returned"): 1, ("from", "arrived"): 1})
        run = cluster.run(owned_by_one(3), asked)
        assert_tokens_of_one_machine(run.asked)
        assert not run.keeper.degraded and run.keeper.table.moved == 8
        np.testing.assert_array_equal(run.keeper.held_NLE, owned_by_one(3))


@pytest.mark.slow
def test_a_server_may_come_back_again_and_again_while_blocks_migrate():
    tables, asked = [random_held(3, seed) for seed in range(4)], asked_of(3)
    with LiveCluster([SLOTS] * 3) as cluster:
        again = iter([0, 2, 1])

        def react(way, server, name, fields):
            first = (way, name) == ("from", "token") and not cluster.paused
            if first or (way, name) == ("from", "returned"):
                cluster.paused = True
                if (victim := next(again, None)) is not None:
                    pause(cluster, victim)

        cluster.paused, cluster.scheduler.react = False, react
        cluster.hold(asked[-1], {("from", "returned"): 3})
        run = cluster.run(tables[0], asked, policy=Wandering(tables, 0.02))
        assert_tokens_of_one_machine(run.asked)
        assert [f.server for f in run.failures] == [0, 2, 1]
        assert all(f.returned_s is not None for f in run.failures)
        assert run.keeper.held_NLE.any(axis=0).all()


def test_a_server_that_comes_back_between_two_runs_is_in_the_second():
    with LiveCluster([SLOTS] * 3) as cluster:
        told = []
        server = cluster.servers[1].server
        do_return = server.orders["return"].later

        def come_back(fields, arrays):
            told.append(fields["version"])
            if len(told) == 1:  # it says that it is ready when the run is over
                wait_until(lambda: cluster.scheduler.talk.count("run 2"))
            do_return(fields, arrays)

        server.orders["return"] = Order(later=come_back)
        cluster.scheduler.react = OnNth("from", "token", 8, lambda: pause(cluster, 1))
        first = asked_of(3)
        cluster.hold(first[-1], {("from", "back"): 1})
        run = cluster.run(owned_by_one(3), first)
        assert_tokens_of_one_machine(run.asked)
        second = asked_of(3)
        cluster.hold(second[-1], {("from", "returned"): 1})
        tell_all = cluster.scheduler.tell

        def tell(server, name, *more):
            tell_all(server, name, *more)
            if name == "prepare":
                cluster.scheduler.talk.append("run 2")

        cluster.scheduler.tell = tell
        run = cluster.run(owned_by_one(3), second)
        assert_tokens_of_one_machine(run.asked)
        assert len(told) == 2 and cluster.scheduler.alive == [0, 1, 2]


@pytest.mark.slow
def test_a_server_is_not_taken_in_by_what_it_was_told_before_it_was_lost():
    """It is still filling its slots for this run's beginning when it must return."""
    with LiveCluster([SLOTS] * 3) as cluster:
        cluster.scheduler.serving = lambda: None  # blocks are lost: no audit
        server, talk = cluster.servers[1].server, cluster.scheduler.talk
        do_prepare = server.orders["prepare"].later
        do_return = server.orders["return"].later
        slow = iter([True])

        def prepare(fields, arrays):
            if next(slow, False):
                pause(cluster, 1)
                told = ("to", 1, "return")
                wait_until(lambda: told in [each[:3] for each in talk])
            do_prepare(fields, arrays)

        def come_back(fields, arrays):
            said = ("from", 1, "returned")
            early.append(said in [each[:3] for each in talk])
            time.sleep(0.3)
            early.append(said in [each[:3] for each in talk])
            do_return(fields, arrays)

        early = []
        server.orders["prepare"] = Order(later=prepare)
        server.orders["return"] = Order(later=come_back)
        asked = asked_of(3)
        cluster.hold(asked[-1], {("from", "returned"): 1})
        run = cluster.run(owned_by_one(3), asked)
        assert_tokens_of_one_machine(run.asked)
        assert early == [False, False]
        (failure,) = run.failures
        assert failure.server == 1 and failure.returned_s is not None


@pytest.mark.slow
def test_a_server_whose_way_back_breaks_while_it_prepares_comes_back_all_the_same():
    """The scheduler's connection breaks; the server does not notice."""
    with LiveCluster([SLOTS] * 3) as cluster:
        server, breaks = cluster.servers[1].server, iter([True])
        do_return = server.orders["return"].later

        def come_back(fields, arrays):
            if next(breaks, False):
                lose_way(cluster.transport, FIRST + 1)
                time.sleep(0.3)  # until the scheduler has heard of it
            do_return(fields, arrays)

        server.orders["return"] = Order(later=come_back)
        cluster.scheduler.react = OnNth("from", "token", 8, lambda: pause(cluster, 1))
        asked = asked_of(3)
        cluster.hold(asked[-1], {("from", "returned"): 1})
        run = cluster.run(owned_by_one(3), asked)
        assert_tokens_of_one_machine(run.asked)
        assert [f.returned_s is not None for f in run.failures] == [True]


def test_a_server_that_nobody_takes_back_ends_with_one_line(monkeypatch):
    monkeypatch.setattr(way_back, "BACK_S", 0.1)
    monkeypatch.setattr(way_back, "AGAIN_S", 0.05)
    with LiveCluster([SLOTS] * 2) as cluster:
        one = cluster.servers[1]
        one.server.go_back()  # between two runs nobody takes it in
        one.join()
        assert isinstance(one.error, SchedulerLost)
        assert "not taken this process in again within 0.1 s" in str(one.error)
        one.error = None


def test_a_server_that_calls_all_others_hung_evicts_nobody():
    with LiveCluster([9] * 7) as cluster:
        asked = asked_of(7)
        cluster.hold(asked[-1], {("to", "reach"): 6})
        run = cluster.run(owned_by_one(7), asked, drill=Drill("accuse", 0, 8))
        assert_tokens_of_one_machine(run.asked)
        assert not run.failures and cluster.scheduler.alive == list(range(7))
        assert not cluster.scheduler.accusations.found_bad
        talk = cluster.scheduler.talk
        told = [t[3]["server"] for t in talk if t[:3] == ("to", 0, "reach")]
        assert sorted(told) == list(range(1, 7))


def cut(cluster, by: int, who: int, for_good: bool = True) -> None:
    """A server does not reach another one; both reach the scheduler."""
    cluster.servers[by].lose_way_to(FIRST + who, for_good)


def run_with_cut(slots, held_NLE, pairs) -> tuple:
    """(cluster, run) in which servers lose their way to others after some tokens."""
    with LiveCluster(slots) as cluster:

        def cut_all():
            for pair in pairs:
                cut(cluster, *pair)

        cluster.scheduler.react = OnNth("from", "token", 8, cut_all)
        run = cluster.run(held_NLE, asked_of(len(slots)))
        assert_tokens_of_one_machine(run.asked)
        assert not run.failures
        assert sorted(cluster.scheduler.accusations.found_bad) == pairs
        return cluster, run


def test_a_server_that_cannot_reach_another_one_asks_other_holders(capfd):
    held_NLE = np.concatenate([owned_by_one(2), np.ones((1, 2, 12), bool)])
    _, run = run_with_cut([SLOTS] * 3, held_NLE, [(0, 1)])
    calls = run.notes[0][1]["calls"]
    last_to = {n: calls[calls[:, 2] == n, 0].max(initial=0) for n in (1, 2)}
    assert last_to[1] < last_to[2] and not run.keeper.table.moved
    assert "server 0 cannot reach server 1, though both" in capfd.readouterr().err


def test_blocks_out_of_reach_are_copied_to_where_there_is_room():
    _, run = run_with_cut([SLOTS] * 2, owned_by_one(2), [(0, 1)])
    assert run.keeper.held_NLE[0].all()
    assert (run.keeper.held_NLE[1] == owned_by_one(2)[1]).all()


def test_blocks_out_of_reach_are_read_for_each_call_without_room():
    _, run = run_with_cut([13, 13], owned_by_one(2), [(0, 1), (1, 0)])
    assert not run.keeper.table.moved and not run.keeper.degraded
    assert [run.notes[n][0]["most_used"] for n in (0, 1)] == [13, 13]


@pytest.mark.slow
def test_a_server_without_slots_asks_one_that_it_reaches_to_read():
    held_NLE = np.concatenate([np.zeros((1, 2, 12), bool), owned_by_one(2)])
    _, run = run_with_cut([0, 13, 13], held_NLE, [(0, 1)])
    assert not run.keeper.table.moved
    calls = run.notes[0][1]["calls"]
    assert set(calls[-20:, 2]) == {2}


def test_a_server_without_slots_that_reaches_nobody_ends_the_run():
    with LiveCluster([0, SLOTS]) as cluster:
        held_NLE = np.concatenate([~random_held(1), random_held(1)])
        react = OnNth("from", "token", 8, lambda: cut(cluster, 0, 1))
        cluster.scheduler.react = react
        with pytest.raises(NobodyLeft, match=r"server 0 .* reaches none .* \[1\]"):
            cluster.run(held_NLE, asked_of(2))


def test_a_connection_that_breaks_once_is_made_again():
    with LiveCluster([SLOTS] * 2) as cluster:
        react = OnNth("from", "token", 8, lambda: cut(cluster, 0, 1, for_good=False))
        cluster.scheduler.react = react
        run = cluster.run(owned_by_one(2), asked_of(2))
        assert_tokens_of_one_machine(run.asked)
        assert not run.failures and not run.keeper.table.moved
        assert not cluster.scheduler.accusations.found_bad
        assert cluster.scheduler.talk.count(("from", 0, "together", {"who": 1})) == 1
        calls = run.notes[0][1]["calls"]
        assert calls[-1, 2] == 1  # it asks it still
