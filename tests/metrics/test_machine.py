import sys

import jax

from moe_edge.metrics import machine
from moe_edge.metrics.schema import MACHINE_KEYS


def test_machine_info_has_the_schemas_keys():
    info = machine.machine_info()
    assert set(info) == MACHINE_KEYS | {"kernels"}  # older entries have no such key
    assert info["backend"] == "cpu" and info["gpu"] is None
    assert info["cores"] >= 1 and info["cpu"]


def test_machine_info_says_how_a_gpu_multiplies(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("MOE_EDGE_PARTS", raising=False)
    found = machine.machine_info.__wrapped__()["kernels"]
    kinds = "few rows of an expert exact, a step's attention by XLA, long caches whole"
    assert found.endswith(f"; on the GPU rows in bfloat16 parts: 1, {kinds}")
    monkeypatch.setenv("MOE_EDGE_PARTS", "3")
    found = machine.machine_info.__wrapped__()["kernels"]
    assert found.endswith(f"rows in bfloat16 parts: 3, {kinds}")


def test_device_slug_names_cpu_cores_or_the_gpu(monkeypatch):
    assert machine.device_slug() == f"cpu{machine.cpu_cores()}"
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    assert machine.device_slug() == "nvidia-h100-80gb-hbm3"


def test_run_tool_missing_or_failing_gives_none():
    assert machine.run_tool("no-such-tool-here") is None
    assert machine.run_tool(sys.executable, "-c", "raise SystemExit(1)") is None
    assert machine.run_tool(sys.executable, "-c", "print(7)") == "7"


def test_git_state_without_repository_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "REPOSITORY", tmp_path)
    unknown = {"commit": None, "dirty": None}
    assert machine.git_state.__wrapped__() == unknown
    monkeypatch.setenv("MOE_EDGE_COMMIT", "a1b2")  # of a copy without its history
    assert machine.git_state.__wrapped__() == {"commit": "a1b2", "dirty": None}
