"""What another author's plug-in gave back: each natural mistake is refused by name."""

import re

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import CacheSpec, Eviction
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.place.placer import Placer
from moe_edge.predict.base import Predictor
from moe_edge.predict.predictor_run import PredictorRun
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import Decision, Job, Scheduler

SPEC = CacheSpec(num_layers=2, num_experts=4, top_k=2, layer_S=(-1, -1))
IDS_12 = np.array([[0, 1]], np.int32)


def given(base, **methods):
    """An object of another author's class; a method's value is what it returns."""

    def method(value):
        return lambda self, *arguments, **more: value

    body = {n: m if callable(m) else method(m) for n, m in methods.items()}
    return type("Mine", (base,), {"__module__": "tests.mine", **body})()


def said(kind, method, got, expected):
    text = re.escape(f"{kind} Mine: {method} gave {got}")
    return pytest.raises(ConfigError, match=f"{text}.*, expected {expected}")


# A predictor.

ROW_11 = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    "found", [None, ([[0]], [[1.0]]), (ROW_11, ROW_11), (np.zeros((1, 1), int),)]
)
def test_prediction_that_is_no_arrays_of_ids_and_scores_is_refused(found):
    run = PredictorRun(given(Predictor, predict=found), SPEC, 1)
    with said("predictor", "predict", found, "arrays .ids int32, scores float32"):
        run.predict(0)
    fine = np.zeros((1, 1), np.int32), ROW_11
    assert PredictorRun(given(Predictor, predict=fine), SPEC, 1).predict(0) is fine[0]
    run = PredictorRun(given(Predictor, predict=(fine[0] + 4, ROW_11)), SPEC, 1)
    with pytest.raises(ConfigError, match=r"ids \[\[4\]\].*ids from 0 to 3"):
        run.predict(0)


@pytest.mark.parametrize("method", ["observe", "store", "finish_sequence"])
def test_predictor_whose_method_returns_nothing_is_refused(method):
    run = PredictorRun(given(Predictor, **{method: None}), SPEC, 1)
    with said("predictor", method, None, "the state from now on"):
        run.observe(0, IDS_12, None)
        run.store(0, np.zeros((1, 4), np.float32))
        run.finish_sequences()


# An eviction policy.


def use(policy):
    cache = SlotCache(SPEC, policy)
    for layer in (0, 1):
        cache.look_up(layer, IDS_12, None, 0)
        for expert in (0, 1):
            assert cache.admit(layer, expert) is not None


@pytest.mark.parametrize("found", [None, {}, 3])
def test_eviction_whose_touch_gives_no_state_is_refused(found):
    with said("eviction policy", "touch", found, "the state from now on"):
        use(given(Eviction, touch=found))


@pytest.mark.parametrize("found", [1, None, (0,), np.int32(0)])
def test_victim_without_the_state_is_refused(found):
    with said("eviction policy", "victim", repr(found), r"\(slot, state\)"):
        use(given(Eviction, victim=found))
    with said("eviction policy", "victim", None, "the state from now on"):
        use(given(Eviction, victim=(0, None)))


@pytest.mark.parametrize(
    "found, expected",
    [
        (np.zeros(3, np.float32), "None or an array of 2 numbers, one a slot"),
        (0.0, "None or an array of 2 numbers"),
        ([1, 2], "None or an array of 2 numbers"),
        (np.array(["a", "b"]), "None or an array of 2 numbers"),
        (np.full(2, np.nan, np.float32), "numbers that are not NaN"),
    ],
)
def test_worth_that_slots_cannot_be_sorted_by_is_refused(found, expected):
    with said("eviction policy", "value", repr(found), expected):
        use(given(Eviction, value=found))
    use(given(Eviction, value=np.array([1, 0])))


def test_ranks_of_no_array_of_the_state_is_refused():
    policy = given(Eviction)
    type(policy).ranks = "use_B"
    said = "Mine: ranks is 'use_B', which is no array of its state; expected one of key"
    with pytest.raises(ConfigError, match=said):
        use(policy)


# A scheduler.


def serve(**methods):
    methods.setdefault("pick", lambda self, lane, now_s: Decision([(1, 2)]))
    loop = RequestLoop(given(Scheduler, **methods))
    job = Job(1, floor=2)
    loop.admit(job, loop.arrive(job, 0.0), 0.0)
    loop.end_step(0, 1.0, [*loop.begin_step(0, 0.0)])


@pytest.mark.parametrize(
    "method, found, expected",
    [
        ("assign", None, "the number of a lane"),
        ("assign", 0.0, "the number of a lane"),
        ("place", -3, "an index from 0 to 0"),
        ("place", 1, "an index from 0 to 0"),
        ("place", None, "an index from 0 to 0"),
        ("pick", None, "a Decision"),
        ("pick", [(1, 2)], "a Decision"),
        ("pick", Decision([1]), "a Decision"),
        ("pick", Decision(None), "a Decision"),
        ("pick", Decision([(1, 2.0)]), "a Decision"),
        ("pick", Decision([(1, 2)], {1: 2.0}), "a Decision"),
        ("pick", Decision([(1, 2)], again_s="soon"), "a Decision"),
        ("done", None, "a list of jobs"),
    ],
)
def test_scheduler_that_gives_something_else_is_refused(method, found, expected):
    serve()
    with said("policy", method, repr(found), expected):
        serve(**{method: found})


# A placer.


@pytest.mark.parametrize("found", [None, np.zeros((1, 1, 4), np.int8)])
def test_placer_whose_assign_gives_no_placement_is_refused(found):
    placer = given(Placer, assign=found)
    with said("placer", "assign", repr(found), "a moe_edge Placement"):
        placer.place(np.ones((1, 1, 4)), [np.array([4])])
