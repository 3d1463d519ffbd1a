"""Executors and resident experts by trial."""

import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.papers.coserve.coe.presets import get_preset, record_bytes
from moe_edge.papers.coserve.coe.trial import (
    chosen_machine,
    sample_of,
    try_executors,
    with_executors,
    with_experts,
)
from moe_edge.papers.coserve.simulate.coe_case import CoeCase
from moe_edge.papers.coserve.workload.coe_tasks import board_graph, board_requests


def test_kinds_are_tried_one_after_the_other_and_fewer_are_taken_of_equal():
    values = {(1, 0): 5.0, (2, 0): 9.0, (3, 0): 9.0, (2, 1): 10.0, (2, 2): 8.0}
    asked = []

    def throughput(executors):
        asked.append((executors["gpu"], executors.get("cpu", 0)))
        return values[asked[-1]]

    trial = try_executors({"gpu": 3, "cpu": 2}, throughput)
    assert asked == list(values)
    assert trial.executors == {"gpu": 2, "cpu": 1}
    assert trial.tried[1] == ({"gpu": 2}, 9.0)


def test_what_does_not_fit_ends_the_trial_of_its_kind():
    def throughput(executors):
        if executors["gpu"] > 1 or "cpu" in executors:
            raise CapacityError("too small")
        return 1.0

    trial = try_executors({"gpu": 4, "cpu": 2}, throughput)
    assert trial.executors == {"gpu": 1}
    assert trial.tried == [
        ({"gpu": 1}, 1.0),
        ({"gpu": 2}, None),
        (
            {"gpu": 1, "cpu": 1},
            None,
        ),
    ]
    with pytest.raises(CapacityError, match="too small"):
        try_executors({"cpu": 1, "gpu": 1}, lambda executors: throughput({"gpu": 2}))
    with pytest.raises(ConfigError, match="most executors of gpu must be a positive"):
        try_executors({"gpu": 0}, throughput)


def test_other_executors_share_one_memory_and_leave_another_alone():
    numa, uma = get_preset("numa"), get_preset("uma")
    assert with_executors(numa, {"gpu": 3}).memory_bytes == {
        "gpu": numa.memory_bytes["gpu"]
    }
    shared = with_executors(uma, {"gpu": 3, "cpu": 1}).memory_bytes
    assert shared["gpu"] == 3 * shared["cpu"]
    with pytest.raises(
        ConfigError,
        match="unknown kind of executor 'npu'; did you mean 'gpu'. known: cpu",
    ):
        with_executors(numa, {"npu": 1})


def test_more_experts_leave_less_for_batches():
    graph, machine = board_graph(40), get_preset("numa")
    mean = graph.bytes_E.mean()
    for experts in (4, 20, 60):
        changed = with_experts(machine, graph, experts)
        costs = changed.devices["gpu"]["resnet101"]
        assert changed.pool_bytes("gpu", graph, 2) == int(experts * mean) // 2
        assert costs.max_batch == (8 if experts < 60 else 4)
        assert changed.memory_bytes["gpu"] <= machine.memory_bytes["gpu"]
        assert changed.memory_bytes["cpu"] == machine.memory_bytes["cpu"]
    assert with_experts(machine, graph, 1) is None  # two pools of half an expert
    assert with_experts(machine, graph, 80) is None


def test_machine_is_chosen_by_runs_of_a_sample():
    graph = board_graph(60, record_bytes=record_bytes("reduced"))
    machine = get_preset("reduced")
    sample = sample_of(board_requests(graph, 500, 4e-4), 0.4)
    assert len(sample) == 200
    runs = []

    def throughput(tried):
        value = CoeCase(graph, sample, tried).run("coserve").throughput_per_s
        runs.append((value, dict(tried.executors)))
        return value

    chosen, told = chosen_machine(machine, graph, throughput, {"gpu": 2, "cpu": 1})
    _, executors = max(runs, key=lambda run: run[0])
    assert dict(chosen.executors) == told["executors"] == executors
    assert throughput(chosen) == max(runs[:-1])[0]
    runs.pop()
    assert len(told["executors_tried"]) == 3
    window = told["window"]
    assert window["low"] < window["chosen"] <= window["high"]
    assert len(runs) == 3 + len(window["tried"])
