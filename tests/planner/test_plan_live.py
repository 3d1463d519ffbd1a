"""Plans of a tiny model that are measured here."""

import dataclasses
import json
import types

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.offload_options import AVAILABLE, OffloadOptions
from moe_edge.model.sampling import Sampling
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.planner import calibrate
from moe_edge.planner.live import Live
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.plan import make_plan
from moe_edge.planner.prompts import sampled_prompts
from moe_edge.planner.replayed import Recorded, play
from moe_edge.planner.run_plan import NotFeasible, run_plan
from moe_edge.planner.variants import with_predictors
from tests.support.planned import COSTS

SMALL = {"device_memory": "50%", "prompt_tokens": 8, "new_tokens": 4}
SMALL |= {"calibrate_s": 1e-3, "search_s": 20.0}


@pytest.fixture(autouse=True, scope="module")
def programs(shared_programs):
    """Plans find the programs of those before them compiled."""


@pytest.mark.slow
def test_plan_is_measured_verified_and_run_again(tiny, tmp_path):
    """Written files, the calibration read back, and what another checkpoint may not."""
    given = {**SMALL, "calibrate_s": 3.0, "fixed": ["horizon=1"], "verify": True}
    given |= {"verify_top": 1, "link_bytes_per_s": 1e7, "link_latency_s": 1e-4}
    out = tmp_path / "plan"
    summary = run_plan(out_dir=str(out), checkpoint=str(tiny), **given)
    assert summary == json.loads((out / "plan.json").read_text())
    predicted, measured = summary["predicted"], summary["measured"]
    low, middle, high = predicted["tpot_s"]
    assert 0 < low <= middle <= high and measured["tpot_s"] > 0
    assert measured["device_bytes"] == predicted["device_bytes"][1]
    assert summary["error"]["tpot_s"] == pytest.approx(
        measured["tpot_s"] / predicted["tpot_s"][1] - 1
    )
    errors = summary["errors"]
    assert errors["other_prompts"]["runs"] == len(summary["verified"]) >= 2
    assert errors["own_lookups"]["runs"] == len(summary["verified"])
    assert isinstance(summary["chosen_was_best"], bool)
    refused = {each["what"] for each in summary["refused"]}
    assert {"predictor oracle", "mode fused"} <= refused
    gin = (out / "plan.gin").read_text()
    assert "offload.device_memory = '50%'" in gin and "link_bytes_per_s" in gin
    assert "| tpot_s (ms) |" in (out / "README.md").read_text()

    machine, trace = str(out / "machine.json"), str(out / "trace.csv.gz")
    again = {**SMALL, "machine": machine, "trace": trace, "link_bytes_per_s": 1e7}
    asked = PlanOptions(checkpoint=str(tiny), temperature=0.5, **again)
    plan = make_plan(asked, *asked.base(None))
    assert not plan.files
    assert any(
        "decoded at temperature 1, the plan is f" in n
        for n in plan.summary["assumptions"]
    )
    stored = json.loads((out / "machine.json").read_text())
    stored["models"] = {"0" * 64: next(iter(stored["models"].values()))}
    (tmp_path / "other.json").write_text(json.dumps(stored))
    asked = PlanOptions(
        checkpoint=str(tiny), **{**again, "machine": str(tmp_path / "other.json")}
    )
    with pytest.raises(ConfigError, match="was measured with other checkpoints"):
        make_plan(asked, *asked.base(None))


@pytest.mark.slow
def test_replay_finds_what_the_engine_found_with_every_eviction(tiny):
    """Prompts pass the cache in the groups of the engine's waves: hit for hit."""
    live = Live(str(tiny), None, 1, 96)
    prompts, _ = sampled_prompts(live.reader, 3, 64, 0)
    costs = dataclasses.replace(COSTS, block_bytes=live.block_bytes)
    seen = set()
    for name, kind in EVICTIONS.items():
        if not kind.needs <= AVAILABLE:
            continue
        options = OffloadOptions(device_memory="40%", eviction=name)
        with live.engine(options, with_trace=True) as engine:
            run = live.run(engine, prompts, 8, Sampling(temperature=1.0))
        played = play(Recorded(run.trace, {}), options, live, costs)
        hits, misses = played.counters.hits, played.counters.misses
        assert (name, hits / (hits + misses)) == (name, run.hit_ratio)
        assert misses / len(played.step_s) == pytest.approx(run.misses)
        seen.add(round(run.hit_ratio, 3))
    assert len(seen) > 3


@pytest.mark.slow
def test_target_out_of_reach_writes_the_nearest_plan_and_exits_3(tiny, tmp_path):
    with pytest.raises(NotFeasible, match="the nearest misses tpot_s by") as caught:
        run_plan(
            out_dir=str(tmp_path / "o"), checkpoint=str(tiny), tpot_ms=1e-6, **SMALL
        )
    assert caught.value.exit_code == 3 and not caught.value.summary["feasible"]
    assert (tmp_path / "o" / "plan.gin").is_file()


def test_budget_below_the_least_is_refused_before_anything_is_measured(tiny):
    asked = PlanOptions(checkpoint=str(tiny), **{**SMALL, "device_memory": "1KB"})
    with pytest.raises(CapacityError, match="the minimum is 2 slots"):
        make_plan(asked, *asked.base(None))


def test_model_of_one_format_takes_predictors_costs_from_another():

    other = dataclasses.replace(
        COSTS, layered_s=0.02, per_predictor_s={"none": 0.02}, noise=0.01
    )
    found = with_predictors(other, COSTS)
    assert found.per_predictor_s == {"none": 0.02, "previous": pytest.approx(0.022)}
    assert found.noise == 0.02 and found.miss_host_s["previous"] == [[0.001, 1e-4]]


def test_waits_are_no_part_of_a_step_with_all_experts_here():
    run = types.SimpleNamespace(step_s=np.full((2, 3), 0.03), wait_s=0.01)
    assert calibrate._without_waits(run) == pytest.approx(0.02)
