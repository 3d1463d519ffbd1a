"""Laws of every placer."""

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.place.placer import PLACERS, get_placer
from moe_edge.place.plan import Placement
from tests.place.support import cost_model, frequencies, unequal_slots

UNEQUAL = [name for name in PLACERS if name != "eplb"]


def machines(slots):
    rng = np.random.default_rng(len(slots))
    return cost_model(gpus=[tuple(rng.uniform(0.5, 2, len(s))) for s in slots])


@pytest.mark.parametrize("ratio", [1.0, 1.03, 1.5])
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


def test_placers_name_their_source():
    for name, cls in PLACERS.items():
        assert cls.name == name
        assert cls.SOURCE
