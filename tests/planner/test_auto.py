"""`device_memory auto` of commands and of Python."""

import dataclasses
import inspect

import pytest

import moe_edge as me
from moe_edge.configurables import PLANNED, ROOTS, get_root
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.core.tables import load
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.planner import auto, auto_commands
from moe_edge.planner.asked import check_context
from moe_edge.planner.options import PlanOptions

SERVED = {"max_batch": 2, "max_context": 64, "prefill_chunk": 32}
LOADED = {"target": "engine", "poisson": 9.0, "duration_s": 1.0}
SERVING = {"batch": 2, "prompt_tokens": 32, "joining": True}
COMMANDS = {
    "generate": (
        {"prompt": ["Hello", "all"], "max_new_tokens": 8, "max_context": 32},
        {"batch": 2, "prompt_tokens": 24, "new_tokens": 8, "context": 32},
    ),
    "serve": ({"port": 0, **SERVED}, SERVING),
    "load": ({**LOADED, **SERVED}, SERVING),
}


@pytest.fixture
def asked(monkeypatch):
    """What commands ask of the plan, which is not made."""
    found = {}

    def chosen(checkpoint, budget, fixed, **asked):
        found.update(asked, fixed=fixed)
        return OffloadOptions(device_memory=budget, eviction="lfu")

    monkeypatch.setattr(auto_commands, "auto_memory", lambda *_, **__: "1GB")
    monkeypatch.setattr(auto_commands, "chosen_options", chosen)
    return found


def seen(name: str, calls: list):
    """The root of a command, which is checked and not run."""
    root = load(ROOTS[name])

    def call(**given):
        calls.append(given)
        return root(**given) if given.get("dry_run") else {}

    call.__signature__ = inspect.signature(root)
    return auto_commands.with_auto(name, call)


def test_every_command_that_takes_auto_has_a_reader():
    assert {*auto_commands.READERS} == {*PLANNED}
    for name in PLANNED:
        assert "device_memory" in inspect.signature(get_root(name)).parameters


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_plan_for_what_they_run(tiny, tmp_path, asked, name):
    """Checked before anything is measured; then run with what was chosen."""
    given, expected = COMMANDS[name]
    given = {**given, "checkpoint": str(tiny), "kv_cache": "bfloat16"}
    if name != "serve":
        given["out_dir"] = str(tmp_path / "out")
    calls = []
    seen(name, calls)(**given, device_memory="auto")
    checked, ran = calls
    assert checked["dry_run"] and not ran.get("dry_run")
    assert checked["offload"].device_memory == ran["offload"].device_memory == "1GB"
    assert ran["device_memory"] is None and ran["offload"].eviction == "lfu"
    assert asked["kv_cache"] == "bfloat16" and asked["fixed"] == {}
    assert expected.items() <= asked.items()
    PlanOptions(
        checkpoint=str(tiny), **{n: v for n, v in asked.items() if n != "fixed"}
    )
    if name != "generate":  # running rows and the prompt cache
        assert asked["context"] >= 64


def test_short_plans_of_a_short_context_are_within_it(tiny, tmp_path, asked):
    """Where nobody says how long rows are, more is reserved than some models have."""
    config = open_checkpoint(tiny).config
    given = {"checkpoint": str(tiny), "prompt": ["Hello"], "max_new_tokens": 8}
    seen("generate", [])(**given, device_memory="auto", out_dir=str(tmp_path / "o"))
    del asked["fixed"]
    check_context(PlanOptions(checkpoint=str(tiny), **asked), config)


def test_rows_of_equal_bits_leave_assists_out(tiny, asked):
    given = {"checkpoint": str(tiny), "port": 0, **SERVED}
    seen("serve", [])(**given, device_memory="auto", deterministic=True)
    assert asked["fixed"] == {"assist": None}


def test_a_plan_is_not_begun_for_what_is_refused(tiny, tmp_path, asked):
    given = {"checkpoint": str(tiny), "device_memory": "auto", "prompt": ["Hello"]}
    with pytest.raises(ConfigError, match="batch_size"):
        seen("generate", [])(**given, out_dir=str(tmp_path / "o"), batch_size=0)
    given = {"checkpoint": str(tiny), "device_memory": "auto", **SERVED}
    with pytest.raises(ConfigError, match="--servers share the experts by --slots"):
        seen("serve", [])(**given, port=0, servers=2, dry_run=True)
    with pytest.raises(ConfigError, match="auto is of --target engine, got 'computed'"):
        seen("load", [])(
            **given | LOADED | {"target": "computed"}, out_dir=str(tmp_path / "o")
        )
    assert not asked


@pytest.mark.parametrize("name", ["evaluate", "lm_eval"])
def test_whole_texts_take_the_budget_without_a_plan(tiny, asked, name):
    calls = []
    given = {"checkpoint": str(tiny), "device_memory": "auto", "batch_size": 2}
    seen(name, calls)(**given, offload=OffloadOptions(eviction="lfu"))
    (ran,) = calls
    assert ran["device_memory"] is None and not asked
    assert ran["offload"] == OffloadOptions(device_memory="1GB", eviction="lfu")


def test_auto_takes_the_defaults_where_all_experts_fit(tiny):
    options = auto.chosen_options(str(tiny), "1GB", {"eviction": "lfu"})
    assert (options.device_memory, options.eviction) == ("1GB", "lfu")


def test_caches_of_fewer_bytes_leave_room_for_more_experts(tiny):
    """`holds_all` counts keys and values as they are kept."""
    asked = PlanOptions(checkpoint=str(tiny), context=4096)
    half = dataclasses.replace(asked, kv_cache="bfloat16")
    low, high = 0, 1 << 34
    while high - low > 1:  # the least that holds all, with exact caches
        middle = (low + high) // 2
        holds = auto.holds_all(str(tiny), f"{middle}B", asked)
        low, high = (low, middle) if holds else (middle, high)
    assert not auto.holds_all(str(tiny), f"{low}B", asked)
    assert auto.holds_all(str(tiny), f"{low}B", half)


def test_python_plans_with_the_caches_of_the_model(tiny, monkeypatch):
    found = {}

    def chosen(source, budget, options, **asked):
        found.update(asked)
        return OffloadOptions(device_memory=budget)

    monkeypatch.setattr(auto, "chosen_options", chosen)
    model = me.load(tiny, kv_cache="bfloat16")
    with model.offload("auto", max_context=32):
        assert found["kv_cache"] == "bfloat16" and found["context"] == 32
    with model.offload("auto"):
        assert found["context"] == model.config.max_positions


@pytest.mark.slow
def test_auto_plans_where_some_experts_stay_on_the_host(tiny, monkeypatch):
    monkeypatch.setattr(auto, "CALIBRATE_S", 1e-3)
    live = me.load(tiny)
    needed = live.config.num_layers * live.config.moe.num_experts * live.expert_bytes
    monkeypatch.setattr(
        "moe_edge.public.model.auto_memory", lambda *_: f"{needed + 60_000}B"
    )
    with live.offload("auto", max_context=32) as engine:
        assert engine.generate([3, 4, 5], max_new_tokens=3).tokens
