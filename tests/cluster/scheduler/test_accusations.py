"""What an accusation leads to, with a clock and connections by hand."""

import pytest

from moe_edge.cluster.scheduler.accusations import (
    AGAIN,
    RETRY_S,
    SAME_S,
    WINDOW_S,
    Accusations,
    Ask,
    Connect,
    Found,
)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def looked_into(clock):
    return Accusations(clock)


@pytest.mark.parametrize(
    "kind, question",
    [
        ("dead", Ask(2)),
        ("hung", Ask(2)),
        ("overdue", Ask(2)),
        ("unanswered", Ask(2, calls=True)),
    ],
)
def test_the_accused_is_asked_before_anything_else(looked_into, kind, question):
    assert looked_into.accuse(0, 2, kind) == [question]
    assert not looked_into.bad


@pytest.mark.parametrize("lost", ["dead", "hung"])
def test_an_accused_that_does_not_answer_is_lost(looked_into, lost):
    (question,) = looked_into.accuse(0, 2, "hung")
    assert looked_into.answered(question, lost) == [Found(2, "gone", {"kind": lost})]


def test_an_accused_that_answers_is_connected_to_again_and_stays(looked_into):
    (question,) = looked_into.accuse(0, 2, "hung")
    assert looked_into.answered(question, None) == [Connect(0, 2)]
    assert looked_into.connected(0, 2, reached=True) == [
        Found(0, "together", {"who": 2})
    ]
    assert not looked_into.bad and not looked_into.found_bad


def test_a_server_that_is_reached_by_all_but_one_is_apart_from_that_one(looked_into):
    (question,) = looked_into.accuse(0, 2, "hung")
    looked_into.answered(question, None)
    assert looked_into.connected(0, 2, reached=False) == [Found(0, "apart", {"who": 2})]
    assert looked_into.bad == {(0, 2)}  # in that direction only
    assert looked_into.accuse(0, 2, "dead") == []  # that is known
    assert looked_into.accuse(2, 0, "dead") == [Ask(0)]


def test_a_call_that_is_only_overdue_is_made_again(looked_into):
    (question,) = looked_into.accuse(0, 2, "overdue")
    assert looked_into.answered(question, None) == [Found(2, "slow", {})]
    assert not looked_into.bad


def test_a_call_that_no_attempt_got_through_sets_the_pair_apart(looked_into):
    """The accused is not stuck: its calls are answered."""
    (question,) = looked_into.accuse(0, 2, "unanswered")
    assert looked_into.answered(question, None) == [Found(0, "apart", {"who": 2})]


def test_all_who_accuse_one_server_wait_for_one_question(looked_into):
    (question,) = looked_into.accuse(0, 2, "hung")
    assert looked_into.accuse(1, 2, "overdue") == []
    assert looked_into.accuse(3, 2, "dead") == []
    assert looked_into.accuse(3, 2, "dead") == []  # by a call, too
    actions = looked_into.answered(question, None)
    assert actions == [Found(2, "slow", {}), Connect(0, 2), Connect(3, 2)]
    assert looked_into.accuse(3, 2, "dead") == []  # while they connect


def test_one_server_may_accuse_all_others_and_evicts_nobody(looked_into):
    for who in range(1, 7):
        (question,) = looked_into.accuse(0, who, "hung")
        assert looked_into.answered(question, None) == [Connect(0, who)]
        assert looked_into.connected(0, who, reached=True) == [
            Found(0, "together", {"who": who})
        ]


def test_nobody_accuses_itself(looked_into):
    assert looked_into.accuse(2, 2, "hung") == []


def accuse_and_connect(looked_into):
    (question,) = looked_into.accuse(0, 2, "hung")
    assert looked_into.answered(question, None) == [Connect(0, 2)]
    return looked_into.connected(0, 2, reached=True)


def test_a_pair_that_falls_out_again_and_again_is_set_apart(looked_into, clock):
    for _ in range(AGAIN - 1):
        for _ in range(AGAIN):  # one break, told several times
            assert accuse_and_connect(looked_into) == [Found(0, "together", {"who": 2})]
            clock.now_s += 1
        clock.now_s += SAME_S
    assert accuse_and_connect(looked_into) == [Found(0, "apart", {"who": 2})]
    clock.now_s += RETRY_S  # too early: it would break again
    assert looked_into.due() == [Connect(0, 2)]
    assert looked_into.connected(0, 2, reached=True) == []
    clock.now_s += WINDOW_S
    assert looked_into.due() == [Connect(0, 2)]
    assert looked_into.connected(0, 2, reached=True) == [
        Found(0, "together", {"who": 2})
    ]


def test_a_pair_that_falls_out_seldom_is_not_set_apart(looked_into, clock):
    for _ in range(3 * AGAIN):
        assert accuse_and_connect(looked_into) == [Found(0, "together", {"who": 2})]
        clock.now_s += WINDOW_S / (AGAIN - 1)


def test_a_bad_pair_is_tried_again_and_may_become_good(looked_into, clock):
    (question,) = looked_into.accuse(0, 2, "hung")
    looked_into.answered(question, None)
    looked_into.connected(0, 2, reached=False)
    assert looked_into.due() == []
    clock.now_s += RETRY_S
    assert looked_into.due() == [Connect(0, 2)]
    assert looked_into.due() == []  # it is being tried
    assert looked_into.connected(0, 2, reached=False) == []  # as it was
    clock.now_s += RETRY_S / 2
    assert looked_into.due() == []
    clock.now_s += RETRY_S / 2
    assert looked_into.due() == [Connect(0, 2)]
    assert looked_into.connected(0, 2, reached=True) == [
        Found(0, "together", {"who": 2})
    ]
    assert not looked_into.bad and looked_into.found_bad == [(0, 2)]


def test_an_accuser_that_never_reports_is_heard_again(looked_into, clock):
    (question,) = looked_into.accuse(0, 2, "hung")
    assert looked_into.answered(question, None) == [Connect(0, 2)]
    clock.now_s += RETRY_S - 1
    assert looked_into.accuse(0, 2, "hung") == []
    clock.now_s += 1
    assert looked_into.accuse(0, 2, "hung") == [Ask(2)]


def test_of_a_lost_server_nothing_is_left(looked_into, clock):
    for by, who in ((0, 2), (2, 1), (0, 1)):
        (question,) = looked_into.accuse(by, who, "hung")
        looked_into.answered(question, None)
        looked_into.connected(by, who, reached=False)
    asked = [looked_into.accuse(2, 3, "hung"), looked_into.accuse(1, 3, "hung")]
    looked_into.forget(2)
    assert looked_into.bad == {(0, 1)}
    assert looked_into.answered(asked[0][0], None) == [Connect(1, 3)]
    clock.now_s += RETRY_S
    assert looked_into.due() == [Connect(0, 1)]


def test_a_report_that_nobody_asked_for_changes_nothing(looked_into):
    assert looked_into.connected(0, 2, reached=False) == []
    assert looked_into.connected(0, 2, reached=True) == []
    assert looked_into.answered(Ask(2), None) == []
    assert not looked_into.bad
