"""Laws of every placer."""

import dataclasses
import functools

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.place.baselines import Uniform
from moe_edge.place.eplb import Eplb
from moe_edge.place.placer import (
    ALONE,
    PLACERS,
    Placer,
    fit_placers,
    get_placer,
    listed_placers,
)
from moe_edge.place.plan import Placement
from moe_edge.place.problem import Problem
from tests.place.support import cost_model, frequencies, unequal_slots
from tests.support.slow_cases import slow

UNEQUAL = [name for name in PLACERS if name != "eplb"]


def machines(slots):
    rng = np.random.default_rng(len(slots))
    return cost_model(gpus=[tuple(rng.uniform(0.5, 2, len(s))) for s in slots])


@pytest.mark.parametrize("ratio", [*slow(1.0, 1.03), 1.5])
@pytest.mark.parametrize("name", UNEQUAL)
def test_placer_covers_within_every_gpu_on_unequal_memory(name, ratio):
    for seed in range(4):
        servers = (1, 2, 5, 11)[seed]
        frequency_NLE = frequencies(servers, 5, 12, seed, shared=0.9)
        slots = unequal_slots(servers, 60, ratio, seed, gpus=(1, 3, 2))
        model = machines(slots)
        placement = get_placer(name).place(frequency_NLE, slots, model, seed=seed)
        placement.check(slots)
        again = get_placer(name).place(frequency_NLE, slots, model, seed=seed)
        assert (again.gpu_NLE == placement.gpu_NLE).all()


def test_eplb_covers_equal_memory():
    slots = [np.array([20, 20])] * 3
    placement = get_placer("eplb").place(frequencies(3, 5, 12), slots)
    placement.check(slots)


@pytest.mark.parametrize("name", PLACERS)
def test_placer_memory_below_one_copy_is_refused(name):
    with pytest.raises(CapacityError, match="hold 59 blocks, .* needs 60: 1 blocks"):
        get_placer(name).place(frequencies(2, 5, 12), [np.array([30]), np.array([29])])


@pytest.mark.parametrize("name", PLACERS)
def test_placer_silent_statistics_are_refused(name):
    frequency_NLE = frequencies(2, 5, 12)
    frequency_NLE[1, 3] = 0
    with pytest.raises(ConfigError, match=r"\[1, 3\] sum to 0"):
        get_placer(name).place(frequency_NLE, [np.array([60]), np.array([60])])


def test_placer_current_placement_of_another_model_is_refused():
    current = Placement(np.zeros((2, 5, 11), np.int8))
    slots = [np.array([60]), np.array([60])]
    with pytest.raises(ConfigError, match=r"shape \(2, 5, 11\), statistics .* 12\)"):
        get_placer("optimal").place(frequencies(2, 5, 12), slots, current=current)


def test_get_placer_unknown_name_or_option_lists_the_known():
    with pytest.raises(ConfigError, match="unknown placer 'best'; known: eplb, .*"):
        get_placer("best")
    with pytest.raises(ConfigError, match="eplb has no option 'x'; known: groups"):
        get_placer("eplb", x=1)


@dataclasses.dataclass(frozen=True)
class Chosen(Uniform):
    at: str
    name = "chosen"


def test_listed_placers_are_made_with_their_options():
    assert listed_placers("all") is None
    found = listed_placers("eplb, uniform", {"eplb": {"groups": 2}})
    assert found == {"eplb": Eplb(2), "uniform": Uniform()}
    given = [Chosen("here"), Eplb, "optimal", "moe_infinity"]
    found = listed_placers(given, alone=ALONE)
    assert [*found] == ["chosen", "eplb", "optimal", "moe_infinity"]
    assert found["chosen"] is given[0] and found["moe_infinity"] is None
    assert [*listed_placers("prism,moe_infinity_lb", alone=ALONE)] == [
        *("prism", "moe_infinity_lb")
    ]


@pytest.mark.parametrize(
    "given, options, text",
    [
        ("best", {}, "unknown placer 'best'; known: eplb"),
        ([Uniform(), "uniform"], {}, "placer uniform is given twice, and results are"),
        (
            "prism",
            {"eplb": {}},
            "placer_options are of eplb, and the placers are prism",
        ),
        (
            [Uniform()],
            {"uniform": {"x": 1}},
            "uniform was given as an object and place",
        ),
        ([Chosen], {}, "placer chosen got no at; give it in placer_options"),
        ([3], {}, r"placer is 3, expected a name \(eplb, .*subclass of Placer"),
        ("moe_infinity", {}, "unknown placer 'moe_infinity'"),
    ],
)
def test_listed_placers_refuse(given, options, text):
    with pytest.raises(ConfigError, match=text):
        listed_placers(given, options)


def test_fit_placers_say_why_others_are_left_out(monkeypatch):
    known = PLACERS._classes | {"chosen": Chosen}
    monkeypatch.setattr(PLACERS, "_classes", known)
    problem = Problem(frequencies(2, 5, 12), [np.array([60]), np.array([30])])
    found, left_out = fit_placers(problem)
    assert found.keys() | left_out.keys() == {*PLACERS}
    assert left_out["chosen"].endswith("got no at; give it in placer_options")
    assert left_out["latency"].startswith("placer latency needs a cost model")
    with pytest.raises(ConfigError, match="unknown placer 'best'; known: chosen, "):
        fit_placers(problem, {"best": {}})
    found, left_out = fit_placers(problem, {"chosen": {"at": "there"}})
    assert found["chosen"] == Chosen("there") and "chosen" not in left_out


class Wrong(Uniform):
    """Chooses what it is told to."""

    def __init__(self, gives, by="choose"):
        object.__setattr__(self, by, lambda problem: gives)
        if by == "choose":
            assign = functools.partial(Placer.assign, self)
            object.__setattr__(self, "assign", assign)


@pytest.mark.parametrize(
    "placer, text",
    [
        (
            Wrong(np.ones((2, 1, 3))),
            r"choice of placer Wrong has shape \(2, 1, 3\), exp",
        ),
        (
            Wrong(np.ones((2, 1, 4))),
            "Wrong puts 4 blocks on server 1, which has room fo",
        ),
        (
            Wrong(np.array([[[1, 1, 1, 0]], [[1, 0, 0, 0]]])),
            "of placer Wrong: 1 blocks are on no server, the first is block 3 of lay",
        ),
        (
            Wrong(Placement(np.zeros((2, 1, 4), np.int8)), "assign"),
            "of placer Wrong: GPU 0 of server 1 is given 4 blocks, it holds 3",
        ),
        (
            Wrong(Placement(np.zeros((1, 1, 4), np.int8)), "assign"),
            r"placement of placer Wrong has shape \(1, 1, 4\), expected \(2, 1, 4\)",
        ),
        (type("Idle", (Placer,), {})(), "placer Idle writes neither choose nor assign"),
    ],
)
def test_placer_that_breaks_its_contract_is_refused_by_name(placer, text):
    with pytest.raises(ConfigError, match=text):
        placer.place(frequencies(2, 1, 4), [np.array([4]), np.array([3])])


def test_placers_name_their_source():
    for name, cls in PLACERS.items():
        assert cls.name == name
        assert cls.SOURCE
