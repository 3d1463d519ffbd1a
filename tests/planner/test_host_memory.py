"""Plans where the host's memory has no room for copies of all experts."""

import dataclasses
import json
from pathlib import Path

import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_generate import run_generate
from moe_edge.planner import auto_commands
from moe_edge.planner import plan as planning
from moe_edge.planner.described import Described, read_config
from moe_edge.planner.host_memory import expert_bytes
from moe_edge.planner.live import Live
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.plan import make_plan
from moe_edge.planner.run_plan import run_plan
from tests.support.planned import stored_machine
from tests.support.tiny_checkpoints import raw_config

ROOM = {"prompt_tokens": 8, "new_tokens": 4}


@pytest.fixture(scope="module")
def ours(tiny, tmp_path_factory):
    """The tiny checkpoint in our format, whose experts can be mapped."""
    path = tmp_path_factory.mktemp("ours") / "checkpoint"
    convert_checkpoint(tiny, path, progress=False)
    return str(path)


def sizes_of(checkpoint):
    reader = open_checkpoint(checkpoint)
    return sizes(reader.config, reader.dtype, reader)


@pytest.fixture
def config(tmp_path):
    """A config alone, whose experts are most of the model."""
    raw = raw_config("olmoe") | {"intermediate_size": 256, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return str(tmp_path / "config.json")


def sizes(config, dtype, reader=None) -> tuple[int, int]:
    """Bytes of all experts, and of what else an engine holds."""
    live = Described(config, dtype, 1, 12, None, "cpu", reader=reader)
    return expert_bytes(live), live.needs(OffloadOptions()).other_bytes


def planned(config, free_bytes, **given):
    """A plan for a CPU of so much memory, computed."""
    stored = stored_machine(1)
    stored["device"]["memory_bytes"] = int(free_bytes)
    machine = Path(config).with_name("machine.json")
    machine.write_text(json.dumps(stored))
    given = ROOM | given
    asked = PlanOptions(config_json=config, machine=str(machine), **given)
    return make_plan(asked, *asked.base(None))


def test_pages_stand_where_copies_and_slots_do_not_fit(config):
    every, other = sizes(*read_config(config))
    plan = planned(config, 1.12 * (other + every))
    chosen, predicted = plan.summary["chosen"], plan.summary["predicted"]
    assert chosen["weights"] == "mapped" and chosen["offload"] == {}
    assert predicted["mapped_bytes"] == [every] * 3
    assert predicted["host_bytes"][1] == 0 and predicted["device_bytes"][1] == other
    assert "generate.weights = 'mapped'" in plan.gin and "offload" not in plan.gin
    assert "max_context" not in plan.gin
    assert "--dst checkpoint`" in chosen["convert"] + "`"
    assert "`weights` 'mapped', nothing offloaded" in plan.readme
    assert f"| mapped_bytes (MB) | {every / 1e6:.4g}" in plan.readme
    assert "MB of experts stay in their files" in plan.line
    assert any("system has dropped" in note for note in plan.summary["assumptions"])
    others = plan.summary["alternatives"]
    assert others and all(each["weights"] is None for each in others)


def test_slots_of_a_cpu_leave_room_for_copies(config):
    every, other = sizes(*read_config(config))
    free_bytes = 2.5 * (other + every)
    plan = planned(config, free_bytes)
    predicted = plan.summary["predicted"]
    assert plan.summary["chosen"]["weights"] is None
    assert "memory" not in plan.summary["chosen"]["offload"]
    assert predicted["host_bytes"][1] == every and predicted["mapped_bytes"][1] == 0
    assert predicted["device_bytes"][1] + every <= free_bytes
    assert "files" not in plan.line


def test_experts_stay_on_the_disk_where_not_even_their_pages_fit(config):
    every, other = sizes(*read_config(config))
    plan = planned(config, other + 0.7 * every)
    chosen, predicted = plan.summary["chosen"], plan.summary["predicted"]
    assert chosen["weights"] is None and chosen["offload"]["memory"] == "mmap"
    assert "offload.memory = 'mmap'" in plan.gin
    assert (predicted["host_bytes"][1], predicted["mapped_bytes"][1]) == (0, every)


@pytest.mark.parametrize("memory", ["host", "mmap"])
def test_a_given_budget_and_limit_keep_copies_out(config, memory):
    """The limit decides; memory itself would hold both."""
    every, other = sizes(*read_config(config))
    given = {"device_memory": "50%", "host_memory": f"{every - (memory == 'mmap')}B"}
    plan = planned(config, 4 * (other + every), **given)
    offload = plan.summary["chosen"]["offload"]
    assert plan.summary["feasible"] and offload.get("memory", "host") == memory


def test_budgets_that_do_not_fit_beside_copies_are_refused(config):
    """A CPU's slots and copies are one memory, also where budgets are tried."""
    every, other = sizes(*read_config(config))
    free_bytes = int(1.5 * (other + every))
    plan = planned(config, free_bytes, objective="memory")
    tried = [e for e in plan.summary["alternatives"] if e["offload"]]
    held = [each["predicted"] for each in tried]
    budgets = [each["offload"]["device_memory"] for each in tried]
    assert budgets == ["15%", "25%", "35%", "50%"]
    assert all(e["device_bytes"][1] + e["host_bytes"][1] <= free_bytes for e in held)
    reasons = {each["what"]: each["reason"] for each in plan.summary["refused"]}
    wanted = f"takes {other + every} bytes and copies of the experts {every}, of memory"
    assert wanted in reasons["device_memory 100%"]
    # The least of them decides whether copies fit.
    plan = planned(config, other + 1.1 * every, objective="memory")
    assert {e["offload"].get("memory") for e in plan.summary["alternatives"]} == {
        "mmap"
    }


def test_copies_that_are_fixed_and_do_not_fit_are_refused_in_one_line(config):
    every, other = sizes(*read_config(config))
    message = "copies of the experts take .* are free; leave memory 'host' open, or con"
    with pytest.raises(CapacityError, match=message):
        planned(config, other + every / 2, fixed=["memory=host"])


def test_what_cannot_be_mapped_is_refused_in_one_line(config):
    raw = json.loads(Path(config).read_text()) | {"torch_dtype": "float16"}
    Path(config).write_text(json.dumps(raw))
    every, other = sizes(*read_config(config))
    with pytest.raises(CapacityError, match="convert the checkpoint .*in their files"):
        planned(config, other + every / 2)


def test_a_fixed_memory_is_kept_and_counted(config):
    every, other = sizes(*read_config(config))
    given = {"device_memory": "50%", "fixed": ["memory=mmap"]}
    plan = planned(config, 4 * (other + every), **given)
    assert plan.summary["predicted"]["host_bytes"][1] == 0
    assert plan.summary["predicted"]["mapped_bytes"][1] == every


def test_auto_says_that_copies_do_not_fit(tiny, ours, tmp_path, monkeypatch):
    """A size of less than nothing was asked for before; files leave all of it free."""
    every, _ = sizes_of(ours)
    free = "moe_edge.engine.device_memory.free_device_bytes"
    monkeypatch.setattr(free, lambda device=None: every - 1)
    with pytest.raises(CapacityError, match="copies of the experts take .*--weights m"):
        auto_commands.auto_memory(open_checkpoint(tiny))
    found = auto_commands.auto_memory(open_checkpoint(ours), has_records=True)
    assert found == f"{int((every - 1) * 0.9)}B"


@pytest.mark.slow
def test_mapped_weights_are_measured_verified_and_run(ours, tmp_path, monkeypatch):
    every, other = sizes_of(ours)
    free_bytes = int(1.5 * (other + every))
    stores = []
    monkeypatch.setattr(
        planning, "Live", lambda *given: stores.append(given[-1]) or Live(*given)
    )
    monkeypatch.setattr(planning, "free_device_bytes", lambda: free_bytes)
    free = "moe_edge.engine.device_memory.free_device_bytes"
    monkeypatch.setattr(free, lambda device=None: free_bytes)
    given = {"calibrate_s": 1e-3, "search_s": 5.0, "verify": True, "verify_top": 1}
    given |= ROOM | {"objective": "memory", "device_memory": "auto"}
    out = tmp_path / "plan"
    summary = run_plan(out_dir=str(out), checkpoint=ours, **given)
    assert summary["chosen"]["weights"] == "mapped" and summary["feasible"]
    assert stores == ["mmap"]  # beside copies its pages would not fit while it is timed
    measured = summary["measured"]
    assert measured["tpot_s"] > 0 and measured["hit_ratio"] is None
    assert summary["verified"][0]["own_lookups_error"] is None
    assert summary["verified"][1]["own_lookups_error"] is not None
    assert "generate.weights = 'mapped'" in (out / "plan.gin").read_text()
    ran = {"checkpoint": ours, "prompt": ["Once"], "max_new_tokens": 3}
    assert run_generate(out_dir=str(tmp_path / "g"), weights="mapped", **ran)


def test_dry_run_refuses_files_that_cannot_be_mapped(tiny):
    asked = PlanOptions(checkpoint=str(tiny), fixed=["memory=mmap"], **ROOM)
    with pytest.raises(ConfigError, match="is not in our format and holds no expert"):
        planning.check_plan(asked, *asked.base(None))


def test_dry_run_finds_room_as_the_plan_does(ours, monkeypatch):
    every, other = sizes_of(ours)
    monkeypatch.setattr(planning, "free_device_bytes", lambda: other + every)
    asked = PlanOptions(checkpoint=ours, device_memory="50%", **ROOM)
    base, budgets, refused, is_whole = planning.check(asked, *asked.base(None))
    assert (
        base.memory == "mmap" and budgets == ("50%",) and not refused and not is_whole
    )
    asked = dataclasses.replace(asked, host_memory="1GB")
    monkeypatch.setattr(planning, "free_device_bytes", lambda: 3 * (other + every))
    assert planning.check(asked, *asked.base(None))[0].memory == "host"
