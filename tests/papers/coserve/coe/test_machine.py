"""Profiles, executors, memory and presets."""

import dataclasses
import json
import re

import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.papers.coserve.coe.case import MachineOptions, probability_E
from moe_edge.papers.coserve.coe.machine import Machine, parse_executors, parse_memory
from moe_edge.papers.coserve.coe.presets import (
    PRESETS,
    get_preset,
    record_bytes,
    reduced,
)
from moe_edge.papers.coserve.coe.profile import ArchitectureCosts, read_profile
from moe_edge.papers.coserve.coe.setup import make_setup
from moe_edge.papers.coserve.coe.trial import with_executors
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.simulate.coe import CoeSimulator
from moe_edge.papers.coserve.workload.coe_tasks import (
    CoeRequest,
    board_graph,
    board_requests,
)

COSTS = {
    "k_s": 0.5,
    "b_s": 1.0,
    "r2": 0.99,
    "max_batch": 4,
    "item_bytes": 10,
    "record_bytes": 100,
    "load_s": {"disk": 3.0, "host": 1.0},
}
PROFILE = {"machine": "m", "devices": {"gpu": {"net": COSTS}}}


def written(tmp_path, value):
    path = tmp_path / "coe_profile.json"
    path.write_text(json.dumps(value))
    return path


def test_profile_is_read(tmp_path):
    devices = read_profile(written(tmp_path, PROFILE))
    assert devices == {"gpu": {"net": ArchitectureCosts(**COSTS)}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "FILE holds no devices; expected a coe_profile.json"),
        ({"devices": {}}, "FILE holds no devices; expected at least one"),
        ({"devices": {"gpu": {}}}, "FILE: device 'gpu' has no architectures"),
        ({"devices": {"gpu": {"net": {}}}}, "FILE: 'net' on 'gpu' lacks k_s"),
        (
            {"devices": {"gpu": {"net": COSTS | {"k_s": 0.0}}}},
            "FILE: 'net' on 'gpu': k_s must be positive, got 0.0",
        ),
        (
            {"devices": {"gpu": {"net": COSTS | {"load_s": {"disk": 1.0}}}}},
            "'gpu': load_s names disk, expected disk, host",
        ),
        (
            {
                "devices": {
                    "gpu": {"net": COSTS | {"load_s": {"disk": -1.0, "host": 0}}}
                }
            },
            "'gpu': load_s of disk must be 0 or more and finite, got -1.0",
        ),
        (
            {"devices": {"gpu": {"net": COSTS | {"load_s": {"disk": "fast"}}}}},
            "FILE: 'net' on 'gpu': load_s: 'disk' is 'fast', expected a number",
        ),
    ],
)
def test_wrong_profile_is_refused(value, message, tmp_path):
    path = written(tmp_path, value)
    with pytest.raises(
        ConfigError, match=re.escape(message.replace("FILE", str(path)))
    ):
        read_profile(path)


def test_executors_and_memory_are_read_from_flags():
    executors = parse_executors("gpu:2, cpu:1")
    assert executors == {"gpu": 2, "cpu": 1}
    memory = parse_memory("9.5GB,13GB", executors)
    assert memory == {"gpu": 9_500_000_000, "cpu": 13_000_000_000}
    for text in ("gpu", "gpu:x", ":1", "gpu:1,gpu:2", "", "gpu:" + 5000 * "9"):
        with pytest.raises(ConfigError, match=f"executors is {text!r}, expected such"):
            parse_executors(text)
    with pytest.raises(ConfigError, match="names 1 amounts, expected 2: gpu, cpu"):
        parse_memory("9GB", executors)
    with pytest.raises(
        ConfigError, match="memory of cpu is '40%', expected an amount such as 9.5"
    ):
        parse_memory("9GB,40%", executors)
    for amount in ("much", "", "0GB", 400 * "9" + "GB"):  # no share is advised
        with pytest.raises(
            ConfigError,
            match=f"^memory of gpu is '{amount}', expected an amount such as 9.5GB in "
            "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB$",
        ):
            parse_memory(f"{amount},1GB", executors)


def machine(**changes):
    devices = {kind: {"net": ArchitectureCosts(**COSTS)} for kind in ("gpu", "cpu")}
    given = {"executors": {"gpu": 1}, "memory_bytes": {"gpu": 500}} | changes
    return Machine(devices, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executors": {}}, "executors of no kind, memory of gpu; expected the same"),
        ({"memory_bytes": {"cpu": 1}}, "executors of gpu, memory of cpu"),
        ({"executors": {"gpu": 0}}, "executors of gpu must be a positive whole number"),
        ({"memory_bytes": {"gpu": 0}}, "memory of gpu must be a positive whole number"),
        (
            {"executors": {"npu": 1}, "memory_bytes": {"npu": 1}},
            "unknown kind of executor 'npu'; did you mean 'gpu'. known: cpu, gpu",
        ),
        (
            {"executors": {"gpu": 10**9}, "memory_bytes": {"gpu": 10**18}},
            "executors are 1000000000 in all, expected at most 1000",
        ),
    ],
)
def test_wrong_machine_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        machine(**changes)


def test_architecture_without_costs_is_refused():
    with pytest.raises(
        ConfigError, match="unknown architecture on gpu 'resnet101'; kno"
    ):
        machine().costs("gpu", board_graph(3))


@pytest.mark.parametrize("name", PRESETS)
def test_preset_holds_the_experts_that_it_says(name):
    graph = board_graph(352, record_bytes=record_bytes(name))
    size, preset = int(graph.bytes_E[0]), get_preset(name)
    alone, tier = (amount // size for amount in preset.alone_bytes(graph))
    counts = preset.executors
    each = [preset.pool_bytes(k, graph, counts[k]) // size for k in preset.kinds]
    assert (alone, tier) == ((110, 0) if name == "uma" else (53, 73))
    assert each == ([33, 33, 33] if name == "uma" else [24, 24, 73])


@pytest.mark.parametrize("name", RECIPES)
def test_setup_fills_the_layout_of_its_recipe(name):
    graph = board_graph(352, record_bytes=record_bytes("reduced"))
    share_E = graph.probability_E()
    setup = make_setup(name, graph, reduced(), share_E)
    recipe = RECIPES[name]
    held = [len(pool.resident) for pool in setup.pools]
    assert held == ([53] if recipe.one_lane else [24, 24, 73])
    assert (setup.tier is None) == (not recipe.tier)
    assert len(setup.start) == sum(held)  # nobody twice
    # The most probable ones, and below them the next ones in the tier.
    least = min(share_E[list(setup.start)])
    assert sum(share_E > least) < sum(held)
    if setup.tier:
        assert len(setup.tier) == 73
        assert not any(e in setup.tier for e in setup.start)
    empty = make_setup(name, graph, reduced(), share_E, start_empty=True)
    assert not empty.start and not (empty.tier and len(empty.tier))


def test_tier_below_one_executor_has_the_memory_of_all_of_the_other_kind():
    graph, numa = board_graph(352), get_preset("numa")
    _, tier = numa.alone_bytes(graph)
    shared = dataclasses.replace(numa, executors={"gpu": 2, "cpu": 3})
    item_bytes = numa.devices["cpu"]["resnet101"].item_bytes
    # Less what two more executors keep for their batches of 8; rounded down for each.
    assert 0 <= tier - 2 * 8 * item_bytes - shared.alone_bytes(graph)[1] < 3


def large_detectors():
    """A board whose largest expert has 700 bytes, and costs of its networks."""
    sizes = {"resnet101": 100, "yolov5m": 50, "yolov5l": 700}
    graph = board_graph(4, record_bytes=sizes)
    return graph, {name: ArchitectureCosts(**COSTS) for name in graph.architectures}


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("name", ["coserve", "samba"])
def test_memory_that_is_named_for_the_largest_expert_is_the_least_that_works(
    name, unified
):
    graph, costs = large_detectors()
    devices, counts = {"gpu": costs, "cpu": costs}, {"gpu": 2, "cpu": 3}

    def setup(gpu, cpu):
        memory = {"gpu": gpu, "cpu": cpu}
        made = Machine(devices, counts, memory, unified=unified)
        return make_setup(name, graph, made, graph.probability_E())

    with pytest.raises(
        CapacityError, match="largest expert has 700 bytes, the largest pool "
    ) as refused:
        setup(400, 300)
    text = str(refused.value)
    assert "\n" not in text and text.endswith(", or fewer executors")
    named = {k: int(n) for n, k in re.findall(r"(\d+) bytes of (all|gpu|cpu)", text)}
    if name == "coserve":
        assert named == {"gpu": 2 * (10 + 700), "cpu": 3 * (10 + 700)}
        setup(named["gpu"], 300)
        setup(400, named["cpu"])
    else:
        assert named == {"all" if unified else "gpu": 710}
        setup(710 - unified * 300, 300)
    with pytest.raises(CapacityError, match="largest expert has 700 bytes"):
        setup(709 - unified * 300 if name == "samba" else named["gpu"] - 1, 300)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("name", ["coserve", "affinity", "samba"])
def test_batches_are_as_large_as_memory_allows_and_the_profile_says(name, unified):
    """Images of 10 bytes, at most 4; the largest expert has 700, the smallest 50."""
    graph, costs = large_detectors()
    devices, requests = {"gpu": costs, "cpu": costs}, board_requests(graph, 40, 0.1)
    batches, longest = [], []
    for gpu in (710, 729, 730, 740, 5000):
        memory = {"gpu": 2 * gpu, "cpu": 60}
        if name == "samba":  # one executor, with all memory if that is one
            memory["gpu"] = gpu - unified * 60
        made = Machine(devices, {"gpu": 2, "cpu": 1}, memory, unified=unified)
        setup = make_setup(name, graph, made, graph.probability_E())
        batches.append([set(of.max_batch) for of in setup.costs])
        free = [pool.budget_bytes for pool in setup.pools]
        assert free[0] == gpu - 10 * setup.costs[0].max_batch[0]
        run = CoeSimulator(graph, setup).run(requests)
        assert len(run.latency_s) == 40
        longest.append(max(step.requests for step in run.steps))
    # Three images would be computed as four.
    assert [of[0] for of in batches] == [{1}, {2}, {2}, {4}, {4}]
    assert all(of[-1] == {1} for of in batches) or name == "samba"
    assert [longest[0], longest[-1]] == [1, 4]


def test_memory_of_a_batch_is_that_of_the_padded_one():
    graph, costs = large_detectors()
    of_7 = {n: dataclasses.replace(one, max_batch=7) for n, one in costs.items()}
    machine = Machine({"gpu": of_7}, {"gpu": 1}, {"gpu": 5000})
    assert machine.batch_bytes("gpu", graph) == 8 * 10
    assert machine.with_batches("gpu", graph, 80) is machine
    fewer = machine.with_batches("gpu", graph, 79)
    assert {one.max_batch for one in fewer.devices["gpu"].values()} == {4}


def test_profile_of_other_networks_is_refused(tmp_path):
    graph, costs = large_detectors()
    found = {name: dataclasses.asdict(one) for name, one in costs.items()}
    for name, one in found.items():
        one["record_bytes"] = graph.architectures[name].record_bytes
    path = tmp_path / "coe_profile.json"
    options = MachineOptions(
        simulate=str(path), executors="gpu:1,cpu:1", memory="2MB,2MB"
    )
    path.write_text(json.dumps({"devices": {"gpu": found, "cpu": found}}))
    assert options.build(graph).executors == {"gpu": 1, "cpu": 1}
    name = next(iter(found))
    wrong = found | {name: found[name] | {"record_bytes": 3}}
    path.write_text(json.dumps({"devices": {"gpu": found, "cpu": wrong}}))
    with pytest.raises(
        ConfigError, match=f"is of '{name}' with 3 bytes an expert, the"
    ):
        options.build(graph)


def test_too_many_executors_are_refused_before_any_is_made():
    graph, costs = large_detectors()
    message = (
        "20 gpu executors have 1000 bytes; each needs 10 for a batch and 50 for the "
        "smallest expert: expected at least 1200, or fewer executors"
    )
    with pytest.raises(CapacityError, match=message):
        many = Machine({"gpu": costs}, {"gpu": 20}, {"gpu": 1000})
        make_setup("coserve", graph, many, graph.probability_E())


@pytest.mark.parametrize("executors", ["gpu:2", "gpu:1,cpu:2", "gpu:4,cpu:1"])
@pytest.mark.parametrize("name", ["numa", "uma"])
def test_executors_without_memory_share_what_the_preset_has(name, executors):
    graph, preset = board_graph(40), get_preset(name)
    made = MachineOptions(simulate=name, executors=executors).build(graph)
    counts = parse_executors(executors)
    assert made == with_executors(preset, counts) and made.executors == counts
    kept = {kind: preset.memory_bytes[kind] for kind in counts}
    assert made.memory_bytes == kept or name == "uma"
    if name == "uma":  # evenly, as in the study of figure 17
        each = {made.memory_bytes[kind] // n for kind, n in counts.items()}
        assert each == {sum(preset.memory_bytes.values()) // sum(counts.values())}
    parallel = MachineOptions(
        simulate=name, executors=executors, memory="9GB," * executors.count(",") + "9GB"
    )
    parallel = dataclasses.replace(parallel, parallel_loads=True).build(graph)
    assert not parallel.one_disk and set(parallel.memory_bytes.values()) == {9 * 10**9}


def test_kind_of_executor_that_a_preset_lacks_is_refused():
    options = MachineOptions(simulate="numa", executors="gpu:1,npu:1")
    with pytest.raises(
        ConfigError,
        match="unknown kind of executor 'npu'; did you mean 'gpu'. known: cpu, gpu",
    ):
        options.build(board_graph(4))


def test_sample_is_of_requests_that_have_a_rule():
    """Where a graph says nothing of how often its experts are used."""
    graph = dataclasses.replace(board_graph(4), frequencies=None)
    image = {"seed": 0, "defect": None}
    strange = [CoeRequest(n, 0.0, "unknown", image) for n in range(40)]
    known = [CoeRequest(f"k{n}", 0.0, "component_2", image) for n in range(10)]
    share_E = probability_E(graph, [*strange, *known])
    assert share_E[graph.rules["component_2"]] == 1
    with pytest.raises(ConfigError, match="no request of the sample has a rule"):
        probability_E(graph, strange)
