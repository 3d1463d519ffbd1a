"""CPU assist of mode fused in plans of a described GPU."""

import json

import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.hardware import presets
from moe_edge.kernels import native
from moe_edge.planner.described import DescribedModel
from moe_edge.planner.helped import LATE_NOTE, is_helped
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.plan import make_plan
from moe_edge.workload.trace_writer import write_trace
from tests.planner.test_elsewhere import OLMOE, ROOM, RTX, config_file, planned
from tests.support.planned import stored_machine
from tests.support.tiny_checkpoints import raw_config
from tests.support.traces import changing_rows, make_trace


@pytest.fixture
def traced(tmp_path):
    """A tiny folder without weights, and a trace whose layers change their experts."""
    raw = raw_config("olmoe")
    E, rows = raw["num_experts"], changing_rows(raw, 24)
    write_trace(tmp_path / "t.csv", make_trace(rows, num_experts=E))
    return config_file(tmp_path, raw), {"trace": str(tmp_path / "t.csv"), **ROOM}


DEFERRED = {
    "option": "assist_deferred",
    "assist": "all",
    "agreement": 0.95,
    "agreement_interval95": [0.94, 0.96],
    "perplexity_ratio": 1.01,
    "ratio_interval95": [1.0, 1.02],
    "batch": 1,
    "device_memory": "50%",
}


def tried_in(summary) -> list[dict]:
    every = [summary["chosen"], *summary["alternatives"]]
    return [each["offload"] for each in every]


def test_a_described_gpu_is_offered_assist_in_fused(traced):
    path, given = traced
    summary = planned(path, device_memory="50%", **given).summary
    tried = tried_in(summary)
    helped = [each for each in tried if each.get("assist_in_fused")]
    assert helped and all(each["mode"] == "fused" for each in helped)
    assert not any(each.get("assist_deferred") for each in tried), "lossless alone"
    assert all(each.get("assist_in_fused") for each in tried if each.get("assist"))
    assert any("a host that is assumed to read" in n for n in summary["assumptions"])
    refused = {each["what"]: each["reason"] for each in summary["refused"]}
    assert "predictor stale_gate prefetch_in_fused True mode fused" in refused
    assert any("two_front" in what for what in refused) and "mode fused" not in refused


def test_a_fixed_assist_is_kept_in_fused(traced):
    path, given = traced
    given |= {"fixed": ["assist=all"], "device_memory": "50%"}
    tried = tried_in(planned(path, **given).summary)
    assert tried and all(
        (each["assist"], each["assist_in_fused"], each["mode"])
        == ("all", True, "fused")
        for each in tried
    )
    given["fixed"] = ["assist=two_front"]
    with pytest.raises(ConfigError, match="two_front is fixed: .*use assist two_poi"):
        planned(path, **given)


def test_without_a_trace_times_say_that_they_have_no_assist(traced):
    path, _ = traced
    summary = planned(path, device_memory="50%", fixed=["assist=all"], **ROOM).summary
    assert "times are without assist all: give --trace" in summary["assumptions"]


def test_no_assist_where_the_mode_is_fixed(traced):
    path, given = traced
    given |= {"fixed": ["mode=layered"], "device_memory": "50%"}
    summary = planned(path, **given).summary
    assert not any(each.get("assist") for each in tried_in(summary))
    assert {"what": "CPU assist", "remedy": "leave mode free"}.items() <= next(
        each.items() for each in summary["refused"] if "assist" in each["what"]
    )
    assert not any("CPU assist" in note for note in summary["assumptions"])


def test_no_assist_of_steps_that_no_engine_helps(tmp_path):
    """17 rows together: the engine's kernels take 16."""
    raw = raw_config("olmoe")
    E, K, L = raw["num_experts"], raw["num_experts_per_tok"], raw["num_hidden_layers"]
    rows = [
        (int(step % 8 > 3), step, layer, [(step + layer + j) % E for j in range(K)])
        for step in range(17 * 8)
        for layer in range(L)
    ]
    write_trace(tmp_path / "t.csv", make_trace(rows, num_experts=E))
    given = {"trace": str(tmp_path / "t.csv"), "device_memory": "50%", **ROOM}
    path, found = config_file(tmp_path, raw), {}
    for batch in (16, 17):
        summary = planned(path, batch=batch, **given).summary
        found[batch] = any(each.get("assist") for each in tried_in(summary))
        refused = [each for each in summary["refused"] if each["what"] == "CPU assist"]
        assert bool(refused) == (batch == 17)
    assert found == {16: True, 17: False}
    gpu = presets.gpu("rtx_4090")
    path = config_file(tmp_path, OLMOE)
    model = DescribedModel(PlanOptions(config_json=path, batch=2, **RTX))
    assert is_helped(model(gpu)) and not is_helped(model(gpu, kind="q4_0"))


def test_a_described_cpu_is_offered_none(traced, tmp_path):
    path, given = traced
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(stored_machine(1)))
    given |= {"machine": str(machine)}
    summary = planned(path, device_memory="50%", **given).summary
    assert not any(each.get("assist") for each in tried_in(summary))
    assert not any("assumed" in note for note in summary["assumptions"])


def planned_with_card(checkpoint, folder, **given):
    """A plan of a checkpoint with a trace and a card of `DEFERRED`."""
    config = open_checkpoint(checkpoint).config
    E, K = config.moe.num_experts, config.moe.top_k
    rows = [
        (int(step > 3), step, layer, [(step + layer + j) % E for j in range(K)])
        for step in range(24)
        for layer in config.moe_layers
    ]
    write_trace(folder / "t.csv", make_trace(rows, num_experts=E))
    (folder / "cards.json").write_text(json.dumps([DEFERRED]))
    files = {"trace": str(folder / "t.csv"), "card": [str(folder / "cards.json")]}
    given = files | {"device_memory": "50%", **RTX, **ROOM} | given
    asked = PlanOptions(checkpoint=str(checkpoint), **given)
    return make_plan(asked, *asked.base(None))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"max_ppl_ratio": 1.005}, "ratio is 1.0100, above 1.005"),
        ({"max_ppl_ratio": 1.05, "trace": None}, "of mode fused, which is tried on"),
    ],
)
def test_a_deferral_that_is_not_tried_is_refused_by_name(tiny, tmp_path, given, reason):
    summary = planned_with_card(tiny, tmp_path, **given).summary
    refused = {each["what"]: each["reason"] for each in summary["refused"]}
    assert reason in refused["deferred assist all"]


@pytest.mark.skipif(native.library() is None, reason="needs the host kernels")
def test_the_engine_takes_what_a_plan_says_of_fused(tiny, tmp_path):
    """A card allows deferral, and the plan's options run."""
    plan = planned_with_card(tiny, tmp_path, max_ppl_ratio=1.05)
    assert plan.summary["chosen"]["offload"].get("assist_in_fused")
    assert any(each.get("assist_deferred") for each in tried_in(plan.summary))
    assert LATE_NOTE in plan.summary["assumptions"]
    found = next(o for o in tried_in(plan.summary) if o.get("assist_deferred"))
    for options in (plan.summary["chosen"]["offload"], found):
        offload = OffloadOptions(**options)
        with load_engine(tiny, with_tokenizer=False, offload=offload).engine as engine:
            assert generate(engine, [[1, 2, 3]], 4).tokens
            assert engine.report()["mode"] == "fused"
