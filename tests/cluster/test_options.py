"""Slots that placements may use, and what is refused."""

import pytest

from moe_edge.cluster.model_checks import check_model, open_at_k
from moe_edge.cluster.modes import options_of
from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.slots import room_of, slots_of
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.model.sub_experts import split_config
from tests.support.tiny_models import ALL, RandomReader


def options(**given) -> ClusterOptions:
    return options_of(workload="words,words,words", **given)


@pytest.mark.parametrize("period_s, spare", [(0.0, 1), (5.0, 2)])
def test_placements_leave_a_slot_and_with_migration_two(period_s, spare):
    given = options(slots="13,12,1", period_s=period_s)
    assert slots_of(given, 20) == [13, 12, 1]
    assert room_of(given, 20) == [13 - spare, 12 - spare, 0]
    shared = options(period_s=period_s)
    assert slots_of(shared, 24) == [11 + spare] * 3  # 1.3 copies
    assert room_of(shared, 24) == [11] * 3


@pytest.mark.parametrize(
    "period_s, text",
    [
        (0.0, r"room for 24 blocks \(one slot of each server stays free\).* needs 25"),
        (1.0, r"room for 21 blocks \(two slots of each server stay free\).* needs 25"),
    ],
)
def test_less_than_one_copy_besides_free_slots_is_refused(period_s, text):
    with pytest.raises(CapacityError, match=text):
        slots_of(options(slots="9,9,9", period_s=period_s), 25)


def test_a_deadline_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="call_s must be positive, got 0.0"):
        options(call_s=0.0)


def test_a_drill_strikes_in_the_last_method():
    given = options(methods="uniform,optimal", drill="kill:1@4")
    assert given.drill_of("uniform") is None
    assert given.drill_of("optimal") == given.drill_plan
    assert given.drill_plan.tokens == 4


def test_route_and_k_of_a_cluster_are_checked():
    """A route is refused where the model has no weights that it could compare."""
    reader = RandomReader(ALL["gqa"])
    given = options(route="prefer", route_options={"bonus": 0.2}, slots="14,12,1")
    assert given.chosen_route.bonus == 0.2
    check_model(given, reader)
    with pytest.raises(ConfigError, match="compares router weights, which sub-experts"):
        check_model(given, RandomReader(split_config(ALL["gqa"], 2, gate="calibrated")))
    with pytest.raises(ConfigError, match="bonus must be a number from 0, got -1"):
        options(route="prefer", route_options={"bonus": -1})
    with pytest.raises(ConfigError, match="know names alone; install the route"):
        options(route=given.chosen_route)
    with pytest.raises(ConfigError, match=r"k must be a number of experts in 1\.\.64"):
        open_at_k(options(k=65))
    assert open_at_k(options(k=4)).config.moe.top_k == 4


def test_od_moe_refuses_a_route_that_prefers_what_is_in_slots():
    given = {"mode": "od_moe", "prompts": __file__}
    options_of(**given, route="substitute", route_options={"a": 0.0})
    with pytest.raises(ConfigError, match="workers of od_moe load each expert"):
        options_of(**given, route="substitute")
