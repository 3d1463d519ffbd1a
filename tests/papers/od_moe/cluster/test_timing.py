"""The timing model, by hand in binary fractions, and against a first study's ratios."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.od_moe.cluster.groups import longest_load_s
from moe_edge.papers.od_moe.cluster.timing import Timing

# Two layers and two groups: a layer computes 1 s here and 2 s there.
PARTS = {"layers": 2, "main_s": 1.0, "worker_s": 2.0}


def test_nothing_to_load_takes_the_sum_of_the_parts():
    timing = Timing(load_s=0.0, shadow_s=0.0, **PARTS)
    assert timing.token_ends_s(3) == [6.0, 12.0, 18.0]
    assert timing.token_s() == timing.resident_s == 6.0


def test_without_predictions_every_layer_waits_for_its_load():
    timing = Timing(load_s=4.0, **PARTS)
    assert timing.token_ends_s(2) == [14.0, 28.0]


def test_late_shadow_by_hand():
    # Named at .5 and 1. Layer 0: loaded 8.5, computed 10.5. Layer 1, of the other
    # group: loaded 9, chosen 11.5, computed 13.5. Then the same again.
    timing = Timing(load_s=8.0, shadow_s=1.0, **PARTS)
    assert timing.token_ends_s(2) == [13.5, 27.0]


def test_speculative_shadow_by_hand():
    # Step 2 is named at 1.5 and 2 (the shadow goes on at 1), but group 0 computes until
    # 10.5: layer 0 is loaded 18.5, computed 20.5. Group 1 is free at 13.5: loaded 21.5,
    # as it is chosen; computed 23.5.
    timing = Timing(load_s=8.0, shadow_s=1.0, departure="speculative", **PARTS)
    assert timing.token_ends_s(2) == [13.5, 23.5]


def test_second_layers_slots_fill_while_the_first_is_computed():
    # As above, but group 0's link is free at 8.5: layer 0 of step 2 is loaded 16.5,
    # computed 18.5. Group 1's is free at 9: loaded 17, chosen 19.5, computed 21.5.
    parts = {"departure": "speculative", "worker_layers": 2} | PARTS
    timing = Timing(load_s=8.0, shadow_s=1.0, **parts)
    assert timing.token_ends_s(2) == [13.5, 21.5]


def test_slow_shadow_is_of_no_use_and_no_harm():
    # Named at 16 and 32; chosen at 1, loaded 1.5, computed 3.5; chosen 4.5, computed 7.
    timing = Timing(load_s=0.5, shadow_s=32.0, departure="speculative", **PARTS)
    assert timing.token_ends_s(3) == [7.0, 14.0, 21.0]


def test_alignment_every_second_step_departs_late_every_second_step():
    timing = Timing(load_s=8.0, shadow_s=1.0, token_period=2, kv_period=2, **PARTS)
    # Step 2 as above; step 3 is due: named 24 and 24.5. Layer 0: loaded 32, computed
    # 34; layer 1: loaded 32.5, chosen 35, computed 37.
    assert timing.token_ends_s(3) == [13.5, 23.5, 37.0]
    never = Timing(load_s=8.0, shadow_s=1.0, token_period=0, kv_period=0, **PARTS)
    spec = Timing(load_s=8.0, shadow_s=1.0, departure="speculative", **PARTS)
    assert never.token_ends_s(5) == spec.token_ends_s(5)


def test_late_shadow_waits_for_keys_and_values_where_they_are_due():
    parts = {"load_s": 8.0, "shadow_s": 1.0, "kv_period": 2, "kv_s": 0.25} | PARTS
    # Steps 1 and 2 as without. Before step 3 come two steps' keys and a fixed second:
    # named 29 and 29.5. Layer 0 is chosen before, at 28: loaded 36, computed 38; layer
    # 1: loaded 37.5, chosen 39, computed 41.
    timing = Timing(align_s=1.0, **parts)
    assert timing.token_ends_s(3) == [13.5, 27.0, 41.0]
    early = {"departure": "speculative", **parts}  # it goes on and is patched
    assert Timing(align_s=1.0, **early).token_s(3) == Timing(**early).token_s(3)


def test_mispredictions_add_their_reloads():
    timing = Timing(load_s=0.0, shadow_s=0.0, missed_ratio=0.25, reload_s=2.0, **PARTS)
    assert timing.token_s() == 6.0 + 2 * 0.25 * 2.0


@pytest.mark.parametrize("groups, ratio", [(2, 0.84), (3, 0.74), (4, 0.66)])
def test_longest_load_without_a_stall_and_the_price_of_a_late_shadow(groups, ratio):
    """Six layers, .5 ms here and there, shadow .9 ms: the ratios of a first study."""
    main_s, worker_s = 0.5, 0.5
    load_s = longest_load_s(main_s, worker_s, groups)
    parts = (6, main_s, worker_s, load_s, 0.9, groups)
    late, early = Timing(*parts), Timing(*parts, departure="speculative")
    assert late.resident_s / late.token_s(256) == pytest.approx(ratio, abs=0.01)
    assert early.resident_s / early.token_s(256) == pytest.approx(1.0, abs=0.01)
    # A load that lasts a little longer than it may stalls at every turn of the groups.
    longer = Timing(6, main_s, worker_s, load_s + 0.1, 0.9, groups, "speculative")
    assert longer.token_s(256) - early.token_s(256) == pytest.approx(
        0.1 * 6 / groups, rel=0.05
    )


def test_groups_that_begin_anew_with_each_token_wait_two_layers_each():
    # Four groups, six layers: the first computes layers 0 and 4, and has two layers'
    # time less than it needs until 0 again. So has the second.
    load_s = longest_load_s(0.5, 0.5, 4)
    timing = Timing(6, 0.5, 0.5, load_s, 0.9, 4, "speculative", rotates=False)
    assert timing.resident_s / timing.token_s(256) == pytest.approx(6 / 8, abs=0.01)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"groups": 0}, "groups.*0"),
        ({"load_s": -1.0}, "load_s.*-1"),
        ({"align_s": -1.0}, "align_s.*-1"),
        ({"departure": "soon"}, "soon.*late"),
        ({"missed_ratio": 1.5}, "missed_ratio is 1.5"),
    ],
)
def test_times_that_cannot_be_are_refused(change, line):
    with pytest.raises(ConfigError, match=line):
        Timing(**({"load_s": 1.0} | PARTS | change))
