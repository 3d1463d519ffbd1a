"""Figures 17 and 18 of CoServe in computed time, on one task."""

import dataclasses

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.coe.presets import get_preset
from moe_edge.papers.coserve.coe.trial import with_experts
from moe_edge.papers.coserve.studies.sizes import (
    Executors,
    Memory,
    check_executors,
    slide,
    with_,
    with_images,
)
from moe_edge.papers.coserve.workload.coe_tasks import board_graph
from tests.support.entries import rows_of
from tests.support.slow_cases import slow_but

SMALL = {
    "coserve_fig17": {"machines": ("numa",), "executors": ("gpu:1", "gpu:2,cpu:1")},
    "coserve_fig18": {"start": 30},
}


@pytest.mark.parametrize("name", slow_but(["coserve_fig17"], SMALL))
def test_whole_study_writes_a_valid_entry(name, tmp_path):
    study = find(name)
    settings = study.settings(**SMALL[name], tasks=("b1",), seeds=1)
    summary = run_study(study, settings, out_dir=str(tmp_path / name))
    result = validate_entry(tmp_path / name)
    check_answer(summary["answer"])
    assert result["kind"] == "simulated"
    places = [row["place"] for row in rows_of(result, "runs")]
    assert places.count("numa") >= 2 and places.count("numa, parallel loads") >= 2


@pytest.mark.parametrize("preset", ["numa", "uma"])
def test_more_experts_leave_less_for_batches_of_the_papers_images(preset):
    graph, machine = board_graph(20), with_images(get_preset(preset))
    mean, batches = graph.bytes_E.mean(), []
    for experts in (10, 34, 40, 50):
        changed = with_experts(machine, graph, experts)
        pool = changed.pool_bytes("gpu", graph, 2)
        assert pool == int(experts * mean) // 2
        batches.append(changed.devices["gpu"]["resnet101"].max_batch)
    assert batches == {"numa": [8, 8, 8, 4], "uma": [8, 8, 8, 8]}[preset]
    assert with_experts(machine, graph, 100) is None


def test_window_slides_as_far_as_a_batch_of_one_image_fits():
    settings = Memory(tasks=("b1",), seeds=1, start=30)
    machine = with_images(get_preset("numa"))
    machine = dataclasses.replace(
        machine, memory_bytes={"gpu": 4_000_000_000, "cpu": 9_000_000_000}
    )
    graph = next(settings.cases("b1", "numa", machine)).graph
    found, window = slide(settings, "b1", "numa", machine)
    assert with_experts(machine, graph, max(found)) is not None
    assert window.high <= max(found) and all(len(each) == 1 for each in found.values())
    tight = dataclasses.replace(
        machine, memory_bytes={"gpu": 500_000_000, "cpu": 9_000_000_000}
    )
    with pytest.raises(CapacityError, match="numa has no room for an expert beside"):
        slide(settings, "b1", "numa", tight)


def test_executors_that_cannot_be_are_refused():
    numa, uma = get_preset("numa"), get_preset("uma")
    assert with_(numa, "gpu:3").kinds == ["gpu"] * 3
    alone, shared = with_(uma, "gpu:2"), with_(uma, "gpu:2,cpu:2")
    assert sum(alone.memory_bytes.values()) == sum(shared.memory_bytes.values())
    with pytest.raises(
        ConfigError,
        match="unknown kind of executor 'npu'; did you mean 'gpu'. known: cpu, gpu",
    ):
        with_(numa, "npu:1")
    with pytest.raises(CapacityError, match="60 gpu executors have 10324000000 bytes"):
        check_executors(Executors(executors=("gpu:60",), machines=("numa",)))
