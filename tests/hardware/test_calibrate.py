import dataclasses
import json

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hardware import calibrate as module
from moe_edge.hardware.calibrate import Calibration, calibrate
from moe_edge.hardware.clusters import cluster_for
from moe_edge.hardware.cost_model import CostModel
from moe_edge.hardware.presets import gpu, lan, read_machine
from moe_edge.hardware.specs import Cluster, Server
from moe_edge.profile.run_profile_machine import run_profile_machine


def test_fit_gives_back_the_sizes_it_was_made_from(monkeypatch):
    # A machine of 1 ms a call, 10^9 bytes/s and 10^10 operations/s.
    def seconds(blocks, tokens, repeats):
        del repeats
        values = 3 * blocks[0][0].size
        if values < 1000:
            return 1e-3
        return 1e-3 + max(4 * values / 1e9, 2 * values * tokens / 1e10)

    monkeypatch.setattr(module, "_block_seconds", seconds)
    found = calibrate("m", d_model=512, expert_dim=512, copies=1, repeats=3)
    device = found.gpu.device
    assert device.call_s == 1e-3
    assert device.memory_bytes_per_s == pytest.approx(1e9)
    assert device.flops_per_s == pytest.approx(1e10)
    assert found.worst_error < 1e-9
    assert [row[0] for row in found.rows] == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        32,
        64,
        128,
        256,
    ]
    assert found.warning is None


@pytest.mark.parametrize("odd, warns", [({}, False), ({12: 9e-3}, True)])
def test_a_processor_that_no_two_rates_describe(monkeypatch, odd, warns):
    # As on the Xeon: one token 1.8 ms, a few tokens 3.8 ms, many in proportion.
    def seconds(blocks, tokens, repeats):
        del repeats
        if blocks[0][0].size < 1000:
            return 1e-5
        usual = 1.8e-3 if tokens == 1 else max(3.8e-3, 2e-4 * tokens)
        return odd.get(tokens, usual)

    monkeypatch.setattr(module, "_block_seconds", seconds)
    found = calibrate("m", d_model=512, expert_dim=512, copies=1, repeats=3)
    by_tokens = {row[0]: row for row in found.rows}
    for tokens in (1, 2, 8, 16, 64, 256):
        assert by_tokens[tokens][2] == pytest.approx(by_tokens[tokens][1])
    assert (
        (found.worst_error > 0.25) == warns == (found.to_json()["warning"] is not None)
    )
    if warns:
        assert (
            "up to 58 %: 12 tokens took 9.000 ms, the formula says 3.78"
            in found.warning
        )


def test_this_machine_becomes_a_preset(tmp_path):
    out_dir = tmp_path / "machine"
    sizes = {"d_model": 256, "expert_dim": 256, "copies": 2, "repeats": 3}
    summary = run_profile_machine(
        out_dir=str(out_dir), most_tokens=64, name="here", **sizes
    )
    assert summary["flops_per_s"] > 1e8 and summary["memory_bytes_per_s"] > 1e7
    path = str(out_dir / "machine.json")
    built = gpu(path, 0.5)
    assert built.device.name == "here" and built.device.source.startswith("measured: ")
    assert built.expert_memory_bytes == int(0.5 * built.device.memory_bytes)
    server = Server(name="s", gpus=(built,))
    costs = CostModel(
        Cluster(servers=(server,), network=lan(100)), module.BlockShape(256, 256, 4)
    )
    rows = json.loads((out_dir / "machine.json").read_text())["rows"]
    measured = cluster_for("deepseek_v2_lite", path, {"mbps": 100, "num_servers": 2})
    assert measured.servers[1].gpus[0].device == built.device
    assert measured.network == lan(100)
    for row in rows:
        assert costs.compute_s(0, 0, row["tokens"]) == pytest.approx(row["fitted_s"])


def test_dry_run_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Calibration, "__init__", None)
    summary = run_profile_machine(out_dir=str(tmp_path / "m"), dry_run=True)
    assert summary["dtype"] == "float32" and not (tmp_path / "m").exists()


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown dtype 'int8'; known: bfloat16, fl"):
        calibrate("m", dtype="int8")
    with pytest.raises(ConfigError, match="expert_dim must be a positive whole number"):
        calibrate("m", expert_dim=0)
    with pytest.raises(ConfigError, match="most_tokens is 1, expected at least 2"):
        calibrate("m", most_tokens=1)
    with pytest.raises(ConfigError, match="curve has 1.0 after 2.0 operations a byte"):
        device = gpu("a6000").device
        dataclasses.replace(device, curve=((2.0, 1.0), (1.0, 1.0)))
    path = tmp_path / "m.json"
    message = "--cluster or a GPU of it: .*m.json does not exist; moe-edge profile_"
    with pytest.raises(FileNotFoundError, match=message):
        cluster_for("deepseek_v2_lite", str(path))
    for content, message in (
        ("{}", "is no machine file"),
        ('{"format_version": 9, "device": 1, "host_link": 1}', "format_version 9"),
        ('{"format_version": 1, "device": {"x": 1}, "host_link": {}}', "'x'"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_machine(path)
