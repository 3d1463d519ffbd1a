import dataclasses
import json
from pathlib import Path

import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.session import cache_bytes
from moe_edge.planner.described import Described, read_config
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.plan import make_plan
from moe_edge.planner.recorded_routing import hit_range
from moe_edge.planner.replayed import layer_slots
from moe_edge.workload.trace_writer import write_trace
from tests.support.tiny_checkpoints import raw_config
from tests.support.traces import changing_rows, make_trace

OLMOE = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "torch_dtype": "bfloat16",
    "vocab_size": 50304,
}
RTX = {"machine": "rtx_4090"}
AUTO = {"device_memory": "6GiB"}  # mode auto, which is fused on a GPU
ROOM = {"prompt_tokens": 8, "new_tokens": 8}


def config_file(folder: Path, raw: dict) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return str(path)


@pytest.fixture
def olmoe(tmp_path):
    """OLMoE-1B-7B's published config.json."""
    return config_file(tmp_path, OLMOE)


def planned(config_json, **given):
    asked = PlanOptions(config_json=config_json, **{**RTX, **given})
    return make_plan(asked, *asked.base(None))


def test_olmoe_is_planned_in_6_gib_without_weights(olmoe):
    summary = planned(olmoe, device_memory="6GiB").summary
    found = summary["predicted"]
    block_bytes = 2 * 3 * 2048 * 1024
    assert summary["feasible"] and summary["chosen"]["offload"] == AUTO
    # 16 layers of 64 experts; the budget is used but for less than a block.
    assert found["host_bytes"] == [16 * 64 * block_bytes] * 3
    assert 0 <= 6 * 2**30 - found["device_bytes"][1] < block_bytes
    low, middle, high = found["tpot_s"]
    assert 0 < low < middle < high and found["hit_ratio"][0] < found["hit_ratio"][2]
    assert any("bytes are exact" in note for note in summary["assumptions"])
    kinds = {each["expert_dtype"] for each in summary["alternatives"]}
    assert "q4_0" in kinds
    assert {each["predicted"]["ppl_ratio"] for each in summary["alternatives"]} == {
        None
    }


def test_bytes_of_a_config_are_those_of_the_engine(tiny):
    options = OffloadOptions(device_memory="50%", mode="layered")
    loaded = load_engine(tiny, with_tokenizer=False, offload=options)
    config, dtype = read_config(str(tiny))
    live = Described(config, dtype, 1, 64, None, "cpu")
    slots = len(layer_slots(options, live))
    needs = live.needs(options)
    with loaded.engine as engine:
        held = engine.device_bytes()
    assert needs.dense + slots * live.block_bytes == held
    assert needs.cache == cache_bytes(config, 1, 64)


def test_budget_below_two_slots_names_the_least(olmoe):
    with pytest.raises(CapacityError, match=r"the minimum is 2 slots, that is \d+ byt"):
        planned(olmoe, device_memory="900MB")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context": 4097}, "--context is 4097 tokens a row, and the model's context "),
        (
            {"prompt_tokens": 4000, "new_tokens": 97},
            "--prompt_tokens 4000 and --new_tokens 97 are 4097 tokens a row",
        ),
    ],
)
def test_rows_longer_than_the_context_are_refused(olmoe, given, message):
    with pytest.raises(CapacityError, match=message):
        planned(olmoe, device_memory="6GiB", **given)


def test_target_out_of_reach_gives_the_nearest_plan(olmoe):
    plan = planned(olmoe, device_memory="6GiB", tpot_ms=0.1)
    assert not plan.summary["feasible"] and plan.missed["tpot_s"] > 1
    assert plan.summary["chosen"]["offload"] == AUTO


def test_objective_memory_tries_budgets(olmoe):
    summary = planned(olmoe, objective="memory", tpot_ms=20.0).summary
    chosen = summary["chosen"]["offload"]["device_memory"]
    assert chosen.endswith("%") and summary["predicted"]["tpot_s"][1] <= 0.02
    assert chosen != "100%"


def test_objective_memory_passes_budgets_that_the_machine_has_not(olmoe, tmp_path):
    """Of 16 GB of experts a machine of 9 GB holds half."""
    device = {"name": "small", "memory_bytes": 9 * 10**9, "flops_per_s": 1e14}
    device |= {"memory_bytes_per_s": 1e12, "source": "measured: gpu"}
    link = {"bytes_per_s": 1e10, "latency_s": 0.0, "source": "measured"}
    file = tmp_path / "machine.json"
    file.write_text(
        json.dumps({"format_version": 1, "device": device, "host_link": link})
    )
    plan = planned(olmoe, objective="memory", tpot_ms=100.0, machine=str(file))
    assert plan.summary["feasible"]
    refused = {each["what"]: each["reason"] for each in plan.summary["refused"]}
    assert "the machine has 9000000000" in refused["device_memory 100%"]
    assert "device_memory 25%" not in refused


def test_trace_of_the_model_is_replayed(tmp_path):
    raw = raw_config("olmoe")
    E, rows = raw["num_experts"], changing_rows(raw, 12)
    write_trace(tmp_path / "t.csv", make_trace(rows, num_experts=E))
    path = config_file(tmp_path, raw)
    given = {"device_memory": "50%", "trace": str(tmp_path / "t.csv"), **ROOM}
    summary = planned(path, **given).summary
    assert summary["replays"] > 3 and summary["sources"]["trace"] == given["trace"]
    assert any("does not say its temperature" in n for n in summary["assumptions"])
    tried = [each["offload"] for each in summary["alternatives"]]
    assert {"lfu"} <= {options.get("eviction") for options in tried}

    write_trace(tmp_path / "t.csv", make_trace(rows, num_experts=E + 1))
    with pytest.raises(ConfigError, match=f"layers of {E + 1} experts.*record one of"):
        planned(path, **given)


def test_checkpoint_is_planned_for_another_machine(tiny):
    asked = PlanOptions(checkpoint=str(tiny), device_memory="50%", **RTX, **ROOM)
    summary = make_plan(asked, *asked.base(None)).summary
    reader = open_checkpoint(tiny)
    blocks = len(reader.config.moe_layers) * reader.config.moe.num_experts
    expected = blocks * reader.layout.num_bytes(reader.dtype)
    assert summary["predicted"]["host_bytes"][1] == expected
    with pytest.raises(ConfigError, match="--verify runs on this machine, and the pla"):
        asked = dataclasses.replace(asked, verify=True)
        make_plan(asked, *asked.base(None))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"torch_dtype": "int3"}, ConfigError, "unknown dtype of .* 'int3'"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            ConfigError,
            "has a quantization_config",
        ),
    ],
)
def test_configs_whose_bytes_are_not_known_are_refused(
    tmp_path, change, error, message
):
    path = config_file(tmp_path, raw_config("olmoe") | change)
    with pytest.raises(error, match=message):
        planned(path, device_memory="50%")


def test_other_bad_input_of_plans_elsewhere(tmp_path, olmoe):
    with pytest.raises(ConfigError, match="unknown device preset 'rtx_1'"):
        planned(olmoe, machine="rtx_1", device_memory="6GiB")
    with pytest.raises(FileNotFoundError, match="none.json does not exist"):
        planned(str(tmp_path / "none.json"), device_memory="6GiB")
    given = {"config_json": olmoe, "device_memory": "6GiB"} | RTX
    for fixed in ("mode=fused", "overlap_in_fused=True"):
        asked = PlanOptions(fixed=[fixed], **given)
        reason = f"{fixed.replace('=', ' ')} is fixed: mode fused decides on"
        with pytest.raises(ConfigError, match=reason):
            make_plan(asked, *asked.base(None))


def test_hit_range_meets_the_recorded_runs():
    assert hit_range(0.25) == pytest.approx((0.465, 0.641, 0.817))
    assert hit_range(1.0) == (1.0, 1.0, 1.0)
