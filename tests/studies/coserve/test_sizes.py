"""Figures 17 and 18 of CoServe in computed time, on one task."""

import pytest

from moe_edge.coe.presets import get_preset
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.studies.coserve.sizes import (
    SIZE,
    Executors,
    check_executors,
    with_,
    with_experts,
)
from moe_edge.studies.registry import find
from moe_edge.studies.study import run_study
from moe_edge.workload.coe_tasks import board_graph

SMALL = {
    "coserve_fig17": {"machines": ("numa",), "executors": ("gpu:1", "gpu:2,cpu:1")},
    "coserve_fig18": {"start": 30},
}


@pytest.mark.parametrize("name", SMALL)
def test_whole_study_writes_a_valid_entry(name, tmp_path):
    study = find(name)
    settings = study.settings(**SMALL[name], tasks=("b1",), seeds=1)
    run_study(study, settings, out_dir=str(tmp_path / name))
    result = validate_entry(tmp_path / name)
    check_answer(result["answer"])
    assert result["kind"] == "simulated" and len(result["metrics"]) >= 4
    names = {row["policy"] + row["name"] for row in result["metrics"]}
    parallel = {name for name in names if "parallel loads" in name}
    assert len(parallel) >= 2 and len(names - parallel) >= 2


def test_more_experts_leave_less_for_batches():
    graph = board_graph(20)
    batches = []
    for experts in (10, 34, 40, 50):
        machine = with_experts(experts)
        pool = machine.pool_bytes("gpu", graph, 2)
        assert pool // SIZE == experts // 2
        batches.append(machine.devices["gpu"]["resnet101"].max_batch)
    assert batches == [8, 8, 4, 2]
    assert with_experts(60) is None


def test_executors_that_cannot_be_are_refused():
    numa, uma = get_preset("numa"), get_preset("uma")
    assert with_(numa, "gpu:3").kinds == ["gpu"] * 3
    alone, shared = with_(uma, "gpu:2"), with_(uma, "gpu:2,cpu:2")
    assert sum(alone.memory_bytes.values()) == sum(shared.memory_bytes.values())
    with pytest.raises(
        ConfigError, match="unknown kind of executor 'npu'; known: cpu, gpu"
    ):
        with_(numa, "npu:1")
    with pytest.raises(CapacityError, match="60 gpu executors have 10324000000 bytes"):
        check_executors(Executors(executors=("gpu:60",), machines=("numa",)))
