"""Estimates by calibrated replay, on a trace made by hand."""

import dataclasses
import types

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.core.context import Context
from moe_edge.engine.device_needs import DeviceNeeds
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.hardware.presets import CALL_S
from moe_edge.model.config import MoeConfig
from moe_edge.planner.calibrate import absent_costs
from moe_edge.planner.candidates import Candidate
from moe_edge.planner.estimate import Subject, estimate
from moe_edge.planner.helped import HOST_BYTES_PER_S, helped_costs
from moe_edge.planner.replayed import Recorded
from tests.support.planned import COSTS
from tests.support.traces import make_trace

E, L, STEPS = 4, 2, 10
NEEDS = DeviceNeeds(500, 300, 0, 0, 1, 16, 2)


def subject(costs=COSTS, batches=2):
    """Every step chooses the next expert of four: two slots a layer never hit."""
    rows, step = [], 0
    for _ in range(batches):
        for phase in [0, *[1] * STEPS]:
            rows += [(phase, step, layer, [step % E]) for layer in range(L)]
            step += 1
    trace = make_trace(rows, E, np.full((len(rows), E), 0.25, np.float16))
    config = types.SimpleNamespace(
        moe=MoeConfig(num_experts=E, top_k=1, expert_dim=8),
        moe_layers=(0, 1),
        num_layers=L,
    )
    live = types.SimpleNamespace(
        config=config,
        block_bytes=1000,
        batch=1,
        machine_bytes=None,
        needs=lambda options: NEEDS,
        decides_on_device=lambda options: False,
        context=lambda options: Context(),
    )
    decoded = trace.step[trace.phase == 1]
    ahead = [np.array([[(step + 1) % E]]) for step in decoded]
    return Subject(live, costs, Recorded(trace, {"previous": ahead}))


def at(budget, **options):
    return Candidate(OffloadOptions(device_memory=budget, **options))


def test_time_is_compute_and_waits_and_what_blocks_cost_the_host():
    """Two absent experts a step: 10 ms of compute, 1 ms each on the link, .1 for it."""
    found = estimate(at("50%"), subject())
    assert found.hit_ratio[1] == 0.0
    assert found.tpot_s[1] == pytest.approx(0.01 + 2 * 0.001 + 2 * 1e-4)
    low, middle, high = found.tpot_s
    assert low < middle < high == pytest.approx(middle * (1 + 1.96 * 0.02))
    assert low == pytest.approx(middle / (1 + 1.96 * 0.02))
    assert found.tokens_per_s[1] == pytest.approx(1 / middle)
    assert found.device_bytes[1] == 800 + 4 * 1000 and found.host_bytes[1] == 8000


def test_no_step_is_shorter_than_one_whose_experts_are_here():
    """A busy machine's calibration found less than nothing for a block."""
    costs = dataclasses.replace(COSTS, miss_host_s={"none": [[0.001, -1.0]]})
    assert estimate(at("50%"), subject(costs)).tpot_s[1] == pytest.approx(0.01)


def test_all_experts_in_slots_take_the_measured_step():
    found = estimate(at("100%"), subject())
    # Each block comes once; two batches share that.
    assert found.tpot_s[1] == pytest.approx(0.01 + 8 / 20 * 1.1e-3, rel=0.1)
    assert found.hit_ratio[1] > 0.6


def test_slower_links_cost_more_by_the_point_that_was_measured_there():
    slow = at("50%", link_bytes_per_s=0.5e6)
    found = estimate(slow, subject())
    assert found.tpot_s[1] == pytest.approx(0.01 + 2 * 0.002 + 2 * 2e-4)


def test_predictor_takes_its_own_step_and_hides_its_transfers():
    found = estimate(at("50%", predictor="previous"), subject())
    assert found.tpot_s[1] < 0.012 + 2 * 1.1e-3


def test_assist_costs_what_an_absent_expert_cost():
    known = {"all": [0.001, 0.0, 0.0005, 0.001, 0.0001, 0.0]}
    costs = dataclasses.replace(COSTS, assist_s=known)
    found = estimate(at("50%", assist="all"), subject(costs))
    missing = 2 * (1 - found.hit_ratio[1])
    assert 0 < missing < 2  # the prompt's stay, where lru alone would lose them
    assert found.tpot_s[1] == pytest.approx(0.01 + missing * 0.0005)
    # What the host computes takes no slot: all policies find what the prompt left.
    others = {
        estimate(at("50%", assist="all", eviction=name), subject(costs)).hit_ratio
        for name in ("lru", "lfu")
    }
    assert len(others) == 1
    with pytest.raises(ConfigError, match="all takes with predictor previous is not"):
        estimate(at("50%", assist="all", predictor="previous"), subject(costs))


def test_costs_of_absent_experts_are_fitted_and_none_is_negative():
    rng = np.random.default_rng(0)
    absent = np.stack([rng.integers(4, 7, 200), rng.integers(8, 40, 200)], 1)
    found = absent_costs(absent, absent @ [3e-4, 2e-5])
    assert found == pytest.approx((3e-4, 2e-5))
    layer_s, each_s = absent_costs(absent, absent @ [3e-4, -2e-6])
    assert each_s == 0 and layer_s == pytest.approx(3e-4, rel=0.1)
    assert absent_costs(np.zeros((3, 2), int), np.zeros(3)) == (0, 0)


def test_first_token_waits_for_what_no_slot_holds():
    """One expert a layer, of which half have no slot at the least."""
    found = estimate(at("50%"), subject())
    low, middle, high = found.ttft_s
    assert middle == pytest.approx(0.1 + 2 * 0.5 * 0.001)
    assert low < middle < high
    costs = dataclasses.replace(COSTS, prefill_block_s=())
    assert estimate(at("50%"), subject(costs)).ttft_s is None


def test_what_an_eviction_costs_the_host_is_counted(monkeypatch):
    one = subject()
    plain = estimate(at("50%"), one).tpot_s[1]
    one._plain_s.update(dict.fromkeys(one._plain_s, -1.0))  # as if it were a second
    assert estimate(at("50%", eviction="lfu"), one).tpot_s[1] > plain + 0.9
    one.live.decides_on_device = lambda options: True
    assert estimate(at("50%", eviction="lfu"), one).tpot_s[1] < plain + 0.9


def test_computed_costs_of_assists_are_the_longer_side_by_hand():
    """A link of 1 ms, a host of .25 ms an expert: `all` waits for the host alone."""
    found = helped_costs(1e-3, round(HOST_BYTES_PER_S * 0.25e-3), 0.4e-3, 4)
    assert set(found) == {
        f"{name} in fused{late}"
        for name in ("all", "fiddler", "two_pointer")
        for late in ("", ", deferred")
    }
    load_s, layer_s, each_s, *seen = found["all in fused"]
    assert (load_s, seen) == (1e-3, [1e-3, pytest.approx(0.25e-3), 0.0])
    assert layer_s == pytest.approx(CALL_S) and each_s == pytest.approx(0.25e-3)
    # Deferred, it has the time of a layer more: of 4 experts 1.03 ms less .4 remain.
    _, layer_s, each_s, *_ = found["all in fused, deferred"]
    late_s = sum(max(CALL_S + n * 0.25e-3 - 0.4e-3, 0) for n in (1, 2, 3, 4))
    fitted_s = sum(layer_s + n * each_s for n in (1, 2, 3, 4))
    assert fitted_s == pytest.approx(late_s, rel=0.1)
    # The first of `two_pointer` always travels.
    assert found["two_pointer in fused"][1] + found["two_pointer in fused"][2] > 0.25e-3
