import itertools
import math
import re

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.offload.budget import Budget, parse_budget, slots_for
from moe_edge.offload.evict_base import CacheSpec
from moe_edge.offload.slot_plan import least_slots, plan_slots, static_hit_curves


@pytest.mark.parametrize(
    "text, budget",
    [
        ("40%", Budget(share=0.4)),
        (" 12.5 % ", Budget(share=0.125)),
        ("100%", Budget(share=1.0)),
        ("2GiB", Budget(bytes=2 * 2**30)),
        ("512MB", Budget(bytes=512 * 10**6)),
        ("0.5 KiB", Budget(bytes=512)),
        ("3B", Budget(bytes=3)),
    ],
)
def test_parse_budget_golden(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text, message",
    [
        ("40", "'40' is no budget"),
        ("lots", "'lots' is no budget"),
        ("-4GiB", "'-4GiB' is no budget"),
        ("2gib", "'2gib' is no budget.*KiB, MiB, GiB"),
        ("0%", "'0%': expected above 0 % to 100 %"),
        ("101%", "'101%': expected above 0 % to 100 %"),
        ("0MB", "'0MB' must be positive"),
    ],
)
def test_parse_budget_rejects_bad_text(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_budget(text)


def test_slots_for_share_counts_expert_bytes_only():
    # 29 % of 100 blocks; the bytes of the rest do not matter.
    assert slots_for(parse_budget("29%"), 10, 100, other_bytes=10**9) == 29
    assert slots_for(parse_budget("15%"), 10, 512) == 76  # 76.8
    assert slots_for(parse_budget("100%"), 10, 512) == 512


@pytest.mark.parametrize("least", [2, 3, 7, 96])
def test_the_minimum_named_as_a_share_is_accepted(least):
    """It was rounded to the nearest digit: 0.1953% of 1024 blocks are not 2 slots."""
    for layers, experts in itertools.product(range(4, 62), (8, 60, 64, 66, 128, 256)):
        blocks = layers * experts
        if least > blocks:
            continue
        with pytest.raises(CapacityError, match=f"minimum is {least} slots") as one:
            slots_for(parse_budget("0.0001%"), 10, blocks, least_slots=least)
        named = re.search(r"that is ([\d.]+%) of the expert bytes", str(one.value))[1]
        got = slots_for(parse_budget(named), 10, blocks, least_slots=least)
        assert least <= got <= math.ceil(1.001 * least), (layers, experts, named)


def test_a_share_that_is_refused_is_named_as_it_was_given():
    message = "of 12.49999% holds 1 slots of 10 bytes; the min.* is 12.5% of the expert"
    with pytest.raises(CapacityError, match=message):  # nor does a share hold others
        slots_for(parse_budget("12.49999%"), 10, 16, other_bytes=99)


def test_slots_for_bytes_pays_for_everything_and_is_capped_at_the_blocks():
    budget = Budget(bytes=1000)
    # (1000 - 500 - 150 - 50) / 40 = 7.5
    assert slots_for(budget, 40, 100, 700) == 7
    assert slots_for(budget, 40, 5) == 5


def test_slots_for_rejects_below_two_slots_and_says_the_minimum():
    with pytest.raises(CapacityError, match="1 slots.*minimum is 2 slots.*780 bytes"):
        slots_for(Budget(bytes=779), 40, 100, 700)
    assert slots_for(Budget(bytes=780), 40, 100, 700) == 2
    with pytest.raises(CapacityError, match="1% holds 0 slots.*is 5% of the expert"):
        slots_for(parse_budget("1%"), 40, 40)
    assert slots_for(parse_budget("5%"), 40, 40) == 2


@pytest.mark.parametrize(
    ("name", "slots", "least"),
    [
        ("auto", None, 2),
        ("one_pool", None, 2),
        ("equal", None, 6),
        ("adapmoe_dp", None, 6),
        ("planned", [3, 4, 2], 9),
        ("planned", np.array([3, 4, 2]), 9),
        ("planned", [3, 4], 6),  # wrong ones: `plan_slots` says so
        ("planned", [3, 4, 99], 6),
        ("planned", ["3", 4, 2], 6),
        ("planned", 5, 6),
    ],
)
def test_least_slots_follow_the_plan(name, slots, least):
    options = {} if slots is None else {"slots": slots}
    assert least_slots(name, 8, 3, options) == least


def test_slots_for_rejects_more_than_the_machine_has():
    with pytest.raises(CapacityError, match="takes 1000 bytes, the machine has 999"):
        slots_for(Budget(bytes=1000), 40, 100, machine_bytes=999)
    with pytest.raises(CapacityError, match="50% takes 2100 bytes, .* has 2000"):
        slots_for(parse_budget("50%"), 40, 100, other_bytes=100, machine_bytes=2000)


def test_plans_golden():
    moe_layers = [1, 2, 3]  # layer 0 is dense
    assert plan_slots("one_pool", 4, 4, 8, moe_layers) == (-1,) * 4
    assert plan_slots("one_pool", 99, 4, 8, moe_layers) == (-1,) * 24
    assert plan_slots("equal", 8, 4, 8, moe_layers) == (1, 1, 1, 2, 2, 2, 3, 3)
    assert plan_slots("equal", 99, 4, 2, moe_layers) == (1, 1, 2, 2, 3, 3)
    planned = plan_slots("planned", 9, 4, 8, moe_layers, slots=[2, 4, 2])
    assert planned == (1, 1, 2, 2, 2, 2, 3, 3)
    assert CacheSpec(4, 8, 2, planned).num_slots == 8


def test_plan_rejects_bad_input():
    with pytest.raises(
        ConfigError, match="unknown slot plan 'fair'; known: adapmoe_dp"
    ):
        plan_slots("fair", 9, 4, 8, [1, 2, 3])
    with pytest.raises(CapacityError, match=r"\[2, 2, 1\] of 5 slots.*2, 6 in all"):
        plan_slots("equal", 5, 4, 8, [1, 2, 3])
    with pytest.raises(CapacityError, match="of 9 slots"):
        plan_slots("planned", 9, 4, 8, [1, 2, 3], slots=[4, 4, 4])
    with pytest.raises(ConfigError, match=r"\[2, 2\]; expected 3 numbers"):
        plan_slots("planned", 9, 4, 8, [1, 2, 3], slots=[2, 2])
    with pytest.raises(ConfigError, match="none above 3"):
        plan_slots("planned", 9, 4, 3, [1, 2, 3], slots=[2, 4, 2])
    with pytest.raises(CapacityError, match="1 slots; the minimum is 2"):
        plan_slots("one_pool", 1, 4, 8, [1, 2, 3])


def test_static_hit_curves_hand_computed():
    curves = static_hit_curves([[1, 6, 3], [0, 0, 0]])
    third = 1 / 3
    np.testing.assert_allclose(
        curves, [[0, 0.6, 0.9, 1.0], [0, third, 2 * third, 1.0]], rtol=1e-12
    )


def test_adapmoe_dp_matches_brute_force():
    rng = np.random.default_rng(0)
    E, M, top_k = 6, 3, 2
    # Not concave on purpose: a greedy choice would fail.
    curves = np.sort(rng.random((M, E + 1)), axis=1)
    accuracy, single = np.array([0.1, 0.7, 0.4]), np.array([0.0, 0.5, 0.2])
    for total in (6, 9, 11, 14, 18):
        layer_S = plan_slots(
            "adapmoe_dp",
            total,
            M,
            E,
            [0, 1, 2],
            hit_curves=curves,
            top_k=top_k,
            prefetch_accuracy=accuracy,
            single_share=single,
        )
        weight = (1 - accuracy) * (single + (1 - single) * top_k)

        def misses(slots, weight=weight):
            return sum(weight[i] * (1 - curves[i, n]) for i, n in enumerate(slots))

        best = min(
            misses(slots)
            for slots in itertools.product(range(2, E + 1), repeat=M)
            if sum(slots) <= total
        )
        got = np.bincount(layer_S, minlength=M)
        assert got.sum() == total
        assert misses(got) == pytest.approx(best, abs=1e-12)


def test_adapmoe_dp_gives_more_slots_to_the_layer_that_prefetches_badly():
    curves = static_hit_curves([[8, 4, 2, 1, 1]] * 2)
    even = {"hit_curves": curves, "top_k": 2}
    layer_S = plan_slots("adapmoe_dp", 6, 2, 5, [0, 1], **even)
    assert np.bincount(layer_S).tolist() == [3, 3]
    layer_S = plan_slots(
        "adapmoe_dp", 6, 2, 5, [0, 1], prefetch_accuracy=[0.9, 0.0], **even
    )
    assert np.bincount(layer_S).tolist() == [2, 4]


def test_adapmoe_dp_rejects_curves_of_wrong_shape_and_too_few_slots():
    with pytest.raises(
        ConfigError, match=r"hit_curves has shape \(2, 5\), exp.*\(2, 6\)"
    ):
        plan_slots("adapmoe_dp", 6, 2, 5, [0, 1], hit_curves=np.zeros((2, 5)), top_k=2)
    curves = static_hit_curves([[8, 4, 2, 1, 1]] * 2)
    with pytest.raises(CapacityError, match="adapmoe_dp gives.*of 3 slots"):
        plan_slots("adapmoe_dp", 3, 2, 5, [0, 1], hit_curves=curves, top_k=2)


def test_auto_is_equal_unless_a_layer_would_get_fewer_than_two():
    assert plan_slots("auto", 9, 3, 8, (1, 2)) == (1,) * 5 + (2,) * 4
    assert plan_slots("auto", 4, 3, 8, (1, 2)) == (1, 1, 2, 2)
    assert plan_slots("auto", 3, 3, 8, (1, 2)) == (-1,) * 3
