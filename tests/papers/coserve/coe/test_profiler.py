"""Costs of experts: the fits by hand, and a measured tiny board."""

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.coserve.coe.profile import ArchitectureCosts, override
from moe_edge.papers.coserve.coe.profiler import (
    ProfileSizes,
    device_of,
    fit_line,
    in_rounds,
    largest_batch,
    profile_all,
)
from moe_edge.papers.coserve.coe.store import ExpertStore
from tests.papers.coserve.support.coe_boards import write_board

COSTS = ArchitectureCosts(0.1, 0.2, 4, 10, 100, {"disk": 1.0, "host": 0.5})
DEVICES = {"gpu": {"a": COSTS, "b": COSTS}, "cpu": {"a": COSTS, "b": COSTS}}


def test_line_is_found_again_and_none_begins_below_zero():
    k_s, b_s, r2 = fit_line({n: 0.003 * n + 0.01 for n in (1, 2, 4, 8)})
    assert (k_s, b_s, r2) == pytest.approx((0.003, 0.01, 1.0))
    k_s, b_s, r2 = fit_line({1: 1.0, 2: 2.4})  # a line would have B -0.4
    assert (k_s, b_s) == pytest.approx(((1 + 1 / 1.2) / (1 + 1 / 1.44), 0.0))
    assert fit_line({4: 2.0}) == (0.5, 0.0, 1.0)


def test_small_batches_count_as_much_as_large_ones():
    times_s = {n: 0.001 * n + 0.004 for n in (1, 2, 4, 8)} | {64: 0.2}
    k_s, b_s, r2 = fit_line(times_s)
    assert k_s + b_s == pytest.approx(0.005, rel=0.3)
    straight = np.polyfit(list(times_s), list(times_s.values()), 1)
    assert sum(straight) < 0.002  # of plain least squares, batches of 1 miss by half
    assert 0.5 < r2 < 0.9  # and the largest batch by more than it would else


@pytest.mark.parametrize(
    ("times_s", "margin", "expected"),
    [
        ({1: 1.0, 2: 1.2, 4: 2.0, 8: 3.9}, 0.05, 4),  # 8 takes 2.5 % less an image
        ({1: 1.0, 2: 1.2, 4: 2.0, 8: 3.9}, 0.01, 8),
        ({1: 1.0, 2: 2.0, 4: 2.0, 8: 4.0}, 0.05, 4),  # 2 does not pay, 4 does
        ({1: 1.0, 2: 2.1, 4: 4.4}, 0.05, 1),
    ],
)
def test_largest_batch_is_the_last_that_pays(times_s, margin, expected):
    assert largest_batch(times_s, margin) == expected


def test_rounds_go_there_and_back_and_the_first_is_not_kept():
    calls = []
    found = in_rounds(lambda n: calls.append(n) or len(calls), [1, 2, 4], 2)
    assert calls == [1, 2, 4, 4, 2, 1, 1, 2, 4]
    assert found == {1: [6, 7], 2: [5, 8], 4: [4, 9]}


def test_tiny_board_is_profiled(tmp_path):
    graph = write_board(tmp_path)
    sizes = ProfileSizes(most_batch=2, repeats=2)
    devices = {"gpu": device_of("cpu")}
    found = profile_all(graph, ExpertStore(graph, tmp_path), devices, sizes)
    assert found.keys() == {"gpu"} and found["gpu"].keys() == graph.architectures.keys()
    for name, one in found["gpu"].items():
        costs = one.costs
        assert costs.record_bytes == graph.architectures[name].record_bytes
        assert costs.max_batch in (1, 2) and 0 < costs.k_s < 1
        image = 32 * 32 * 3 * 4
        assert costs.item_bytes > image and one.bytes[2] > one.bytes[1] > image
        assert costs.load_s["disk"] > 0 and costs.load_s["host"] > 0
        told = one.to_json()
        assert [row["batch"] for row in told["batches"]] == [1, 2]
        assert "temporary" in told["item_bytes"] and "forget" in told["load_s"]


def test_numbers_of_the_user_replace_measured_ones():
    changed = override(DEVICES, ["*.*.disk_s=0.1", "cpu.a.k_s=3", "gpu.*.max_batch=7"])
    assert {c.load_s["disk"] for each in changed.values() for c in each.values()} == {
        0.1
    }
    assert changed["cpu"]["a"].k_s == 3.0 and changed["cpu"]["b"].k_s == 0.1
    assert [changed[k]["b"].max_batch for k in ("gpu", "cpu")] == [7, 4]
    assert DEVICES["cpu"]["a"].k_s == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k_s=1", "set is 'k_s=1', expected such as cpu.classifier.k_s=0.001"),
        (
            "tpu.a.k_s=1",
            "in set 'tpu.a.k_s=1' 'tpu'; did you mean 'gpu'. known: cpu, gpu",
        ),
        ("cpu.c.k_s=1", "unknown architecture in set 'cpu.c.k_s=1' 'c'; known: a, b"),
        ("cpu.a.r=1", "unknown field in set 'cpu.a.r=1' 'r'; known: b_s, disk_s, ho"),
        ("cpu.a.k_s=x", "set is 'cpu.a.k_s=x': 'x' is no number"),
        ("cpu.a.max_batch=1.5", "'1.5' is no number that max_batch may be"),
        ("cpu.a.k_s=-1", "k_s must be positive, got -1.0"),
        ("*.*.host_s=nan", "load_s of host must be 0 or more and finite, got nan"),
    ],
)
def test_wrong_numbers_of_the_user_are_refused(text, message):
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        override(DEVICES, [text])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"most_batch": 0}, "most_batch must be a positive whole number, got 0"),
        ({"repeats": 0}, "repeats must be a positive whole number, got 0"),
        ({"margin": 1.0}, "margin is 1.0, expected a share below 1"),
        ({"margin": 0.0}, "margin must be positive, got 0.0"),
    ],
)
def test_wrong_sizes_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        ProfileSizes(**given)


def test_kinds_have_devices():
    assert device_of("cpu").platform == "cpu"
    assert device_of("gpu") == jax.local_devices()[0]
