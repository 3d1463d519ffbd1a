"""Small cases by hand, what is refused, and each policy where moe_edge calls it."""

import numpy as np
import pytest
from my_policies.decayed import Decayed
from my_policies.drop_last import DropLast
from my_policies.favourites import Favourites
from my_policies.first_travels import FirstTravels
from my_policies.followers import Followers
from my_policies.shortest_first import ShortestFirst

import moe_edge as me
from moe_edge.offload.evict_base import CacheSpec
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.request import Request

L, E, K = 2, 4, 2
SPEC = CacheSpec(L, E, K, (-1,) * 3)


def ids(*rows):
    return np.array(rows, np.int32)


def test_decayed_gives_up_what_was_used_longest_ago_and_least():
    policy = Decayed(keep=0.5)
    state = policy.init(SPEC)
    for step, chosen in enumerate([(0, 1), (0, 1), (2, 1), (2, 1)]):
        state = policy.touch(state, 0, ids(chosen), None, step)
    state["key_S"][:] = 0, 1, 2
    # 0: 1/8 + 1/4; 1: 1/8 + 1/4 + 1/2 + 1; 2: 1/2 + 1.
    assert policy.value(state).tolist() == [0.375, 1.875, 1.5]
    assert policy.victim(state, np.zeros(3, bool))[0] == 0


def test_followers_name_what_followed_the_same_experts():
    predictor = Followers(width=1)
    state = predictor.init(SPEC)
    for first, second in [((0, 1), (2, 3)), ((0, 2), (3, 1)), ((1, 2), (0, 2))]:
        state = predictor.observe(state, 0, None, ids(first), None)
        state = predictor.observe(state, 1, None, ids(second), None)
    state = predictor.observe(state, 0, None, ids((0, E)), None)  # E is padding
    found, scores = predictor.predict(state, 0, 1)
    assert found.tolist() == [[3]] and scores.tolist() == [[2.0]]
    assert predictor.predict(state, 1, 1)[0].size == 0
    kept = predictor.finish_sequence(state, predictor.init(SPEC))
    assert kept["counts_LEE"].sum() == 12 and kept["layer"] == -1


def test_drop_last_leaves_out_an_absent_last_choice_alone():
    given = ids((0, 1), (1, 2), (3, 0)), np.full((3, K), 0.5, np.float32)
    resident_E = np.array([True, True, False, False])
    scores_TE = np.zeros((3, E), np.float32)
    kept = DropLast().route(0, scores_TE, resident_E, None, *given)
    assert kept[0].tolist() == [[0, 1], [1, E], [3, 0]]
    assert kept[1].tolist() == [[0.5, 0.5], [0.5, 0], [0.5, 0.5]]
    assert DropLast(last=0).lossless and not DropLast().lossless
    every = DropLast(last=K).route(0, scores_TE, ~resident_E, None, *given)
    assert every[0].tolist() == [[0, E], [1, 2], [3, E]], "the first one stays"


def test_first_travels_leaves_the_rest_to_the_host():
    assert FirstTravels(travel=1).take([5, 3, 7], ids((5, 3)), None) == [3, 7]
    assert FirstTravels(travel=0).take([5], ids((5, 3)), None) == [5]


def test_favourites_hold_everything_and_copy_what_is_called_often():
    frequency_NLE = np.array([[[5.0, 0.5, 1, 2]], [[1.0, 4, 2, 2]]])
    placement = Favourites().place(frequency_NLE, [np.array([3]), np.array([2])])
    assert placement.on_NLE[:, 0].tolist() == [
        [True, False, True, True],
        [False, True, True, False],
    ]
    alone = Favourites(copies=False).place(
        frequency_NLE, [np.array([3]), np.array([2])]
    )
    assert alone.on_NLE.sum() == 4


def test_shortest_first_until_somebody_has_waited_long_enough():
    loop = RequestLoop(ShortestFirst(max_batch=1, patience_s=2.0))
    for number, (new_tokens, now_s) in enumerate([(9, 0.0), (5, 1.0), (3, 2.5)]):
        job = Request(number, arrival_s=now_s, floor=2, new_tokens=new_tokens)
        loop.admit(job, loop.arrive(job, now_s), now_s)
    # The one of 5 passed the one of 9, whose patience was over when that of 3 came.
    assert [job.id for job in loop.lanes[0].waiting] == [1, 0, 2]
    assert [job.id for job in loop.begin_step(0, 3.0)] == [1]


@pytest.mark.parametrize(
    "kind, option, match",
    [
        (Decayed, {"keep": 0}, r"keep must lie in \(0, 1\], got 0"),
        (Followers, {"width": 0}, "width must be at least 1, got 0"),
        (DropLast, {"last": -1}, "last must be 0 or more, got -1"),
        (FirstTravels, {"travel": -2}, "travel must be 0 or more, got -2"),
        (ShortestFirst, {"max_batch": 0}, "max_batch is 0 and patience_s 5.0"),
        (ShortestFirst, {"patience_s": -1}, "max_batch is 8 and patience_s -1"),
    ],
)
def test_bad_options_are_refused(kind, option, match):
    with pytest.raises(me.ConfigError, match=match):
        kind(**option)
