"""`--devices`: every command that loads a model takes it, and one line refuses it."""

import re

import jax
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.devices import DeviceOptions, device_options
from moe_edge.engine.load import load_engine
from moe_edge.engine.sharded import ShardedEngine
from moe_edge.serve.loading import load_driver
from moe_edge.serve.options import ServingOptions
from tests.launch.test_generate_offload import generated

COMMANDS = {
    "generate": ("--prompt", "A", "--out_dir", "o"),
    "evaluate": ("--text", __file__, "--out_dir", "o"),
    "serve": ("--port", 0),
    "load": ("--target", "engine", "--poisson", 1, "--out_dir", "o"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_refuse_more_devices_than_there_are(name, tiny, run_script):
    there, given = len(jax.devices()), ("--checkpoint", tiny, "--dry_run", "--devices")
    error = run_script(name, *COMMANDS[name], *given, there + 1).error
    assert f"{there + 1} devices, and JAX sees {there}" in error
    error = run_script(name, *COMMANDS[name], *given, "many").error
    assert "devices is 'many', expected a number from 1" in error


def test_no_flag_of_one_device_goes_with_several(tiny, run_script, tmp_path):
    given = "--checkpoint", tiny, "--dry_run", "--devices", 2
    flags = *COMMANDS["generate"], *given, "--device_memory=50%"
    (tmp_path / "fused.gin").write_text("offload.mode = 'fused'\n")
    error = run_script("generate", *flags, "--gin_file", "fused.gin").error
    assert "mode fused runs on one device, got 2 devices" in error
    assert run_script("generate", *flags).summary["dry_run"]
    error = run_script("serve", *COMMANDS["serve"], *given, "--servers", 2).error
    assert "--devices 2 with --servers 2" in error
    for name, flag in (
        ("generate", "--split_attention"),
        ("serve", "--devices_trace=t"),
    ):
        error = run_script(name, *COMMANDS[name], *given[:3], flag).error
        assert f"{flag[2:].removesuffix('=t')}: of several devices of a resi" in error
    error = run_script("generate", *flags, "--split_attention").error
    assert "resident engine, and experts are offloaded; leave it out" in error
    error = run_script("generate", *COMMANDS["generate"], *given, "--devices_trace=t")
    assert error.error.startswith("error: t: no such file or directory")
    for name in ("generate", "serve"):
        copies = *COMMANDS[name], *given, "--devices_replicas"
        error = run_script(name, *copies, "-1").error
        assert "devices_replicas is -1, expected a number from 0" in error
        error = run_script(name, *copies, "1").error
        assert "no counts say which experts to copy; give devices_trace" in error


@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_commands_load_for_as_many_devices(name, tiny, run_script, monkeypatch):
    def load(*_, devices, **__):
        raise ConfigError(f"loaded for {device_options(devices).devices!r} devices")

    monkeypatch.setattr("moe_edge.engine.run_generate.load_engine", load)
    monkeypatch.setattr("moe_edge.evaluate.run.load_engine", load)
    given = "--checkpoint", tiny, "--devices", "all"
    assert "loaded for 'all' devices" in run_script(name, *COMMANDS[name], *given).error


def test_engines_are_loaded_onto_as_many_devices(tiny, monkeypatch):
    engine = load_engine(tiny, with_tokenizer=False, devices="3").engine
    assert isinstance(engine, ShardedEngine) and engine.mesh.size == 3

    def load(*_, devices, **__):
        raise ConfigError(f"loaded for {devices}")

    monkeypatch.setattr("moe_edge.serve.loading.load_engine", load)
    shared = DeviceOptions(devices=2, split_attention=True)
    with pytest.raises(ConfigError, match=f"loaded for {re.escape(str(shared))}"):
        load_driver(tiny, None, None, ServingOptions(), shared)


@pytest.mark.slow
def test_generate_on_several_devices_writes_the_tokens_of_one(tiny, tmp_path):
    one, _ = generated(tiny, tmp_path / "one")
    assert generated(tiny, tmp_path / "three", devices=3)[0] == one
    given = {"devices": 3, "device_memory": "20%"}
    tokens, summary = generated(tiny, tmp_path / "homes", **given)
    assert tokens == one and summary["bytes_moved"] > 0
