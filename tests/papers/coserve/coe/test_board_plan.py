"""Which experts a board has, and what they are trained on."""

import dataclasses
import json

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.core.json_reader import MAX_FILE_BYTES
from moe_edge.papers.coserve.coe.board_options import (
    MOST_TYPES,
    BoardOptions,
    Recipe,
    is_followed,
)
from moe_edge.papers.coserve.coe.board_plan import board_plan
from moe_edge.papers.coserve.coe.board_training import (
    STATE_FILE,
    Facts,
    TrainingState,
    file_of,
)
from moe_edge.papers.coserve.workload.coe_graph import read_graph, write_graph


def test_boards_have_a_classifier_a_type_and_shared_detectors():
    plan = board_plan(BoardOptions(), seed=0)
    names = [e.architecture for e in plan.graph.experts]
    assert (names.count("board_resnet"), names.count("board_detector")) == (24, 4)
    seen = [sum(e == d for e in plan.graph.follow.values()) for d in range(24, 28)]
    assert seen == [2, 2, 2, 2]
    assert all(e.trained for e in plan.graph.experts)
    assert sum(plan.graph.frequencies.values()) == pytest.approx(1)
    large = board_plan(BoardOptions(types=352), seed=0)
    assert len(large.graph.experts) == 352 + 30
    assert len(large.graph.follow) == round(0.35 * 352)
    sizes = [one.record_bytes for one in plan.graph.architectures.values()]
    assert 24 * sizes[0] + 4 * sizes[1] < 6e6


def test_larger_boards_keep_what_smaller_ones_train_classifiers_on():
    small, large = (
        board_plan(BoardOptions(types=types), seed=0) for types in (10, 100)
    )
    assert small.parts[:10] == large.parts[:10]
    assert [n for n in range(20) if is_followed(n)] == [2, 5, 8, 11, 14, 17, 19]


def test_parts_are_those_of_the_types_that_lead_to_an_expert():
    plan = board_plan(BoardOptions(types=12, detectors=2), seed=0)
    (alone,), (followed,) = plan.parts[0], plan.parts[2]
    assert set(alone.defects) == {None, "damaged"}
    assert {"misaligned", "wrong_polarity"} < set(followed.defects)
    for part in (alone, followed):
        assert part.defects.count("damaged") * 2 == len(part.defects)
    assert [p.component for p in plan.parts[12]] == ["component_2", "component_8"]
    assert set(plan.parts[12][0].defects) == {None, "misaligned", "wrong_polarity"}


def test_experts_that_are_not_trained_copy_those_that_are():
    plan = board_plan(BoardOptions(types=9, trained_types=3, detectors=2), seed=0)
    trained = [e for e, expert in enumerate(plan.graph.experts) if expert.trained]
    assert trained == [0, 1, 2, 9]  # of types 2, 5 and 8, the first is trained
    assert plan.origin == [0, 1, 2, 0, 1, 2, 0, 1, 2, 9, 9]
    assert not any(plan.parts[e] for e in (3, 8, 10))
    nobody = board_plan(BoardOptions(types=9, trained_types=1), seed=0)
    assert nobody.origin[9] == 9 and not nobody.graph.experts[9].trained
    assert board_plan(BoardOptions(types=2), seed=0).graph.architectures.keys() == {
        "board_resnet"
    }


def write_files(folder, types):
    """A board's graph and state of training, each network with a file."""
    graph = board_plan(BoardOptions(types=types, trained_types=2), seed=0).graph
    facts = Facts(*("0" * 64,) * 2, accuracy=1 / 3, steps=600, seconds=12.34)
    names = {expert.id: f"experts/{expert.id}" for expert in graph.experts}
    experts = [
        dataclasses.replace(e, file=file_of(names[e.id], facts.sha256), sha256="0" * 64)
        for e in graph.experts
    ]
    write_graph(folder / "coe.json", dataclasses.replace(graph, experts=experts))
    state = json.dumps({name: vars(facts) for name in names.values()}, indent=1)
    (folder / STATE_FILE).write_text(state)
    return len(experts)


def test_large_boards_are_read(tmp_path):
    count = write_files(tmp_path, types=9)
    for name in ("coe.json", STATE_FILE):
        with (tmp_path / name).open("a") as file:
            file.write(" " * MAX_FILE_BYTES)
    assert len(read_graph(tmp_path / "coe.json").experts) == count
    assert len(TrainingState(tmp_path).files) == count


@pytest.mark.slow
def test_the_largest_board_is_read(tmp_path):
    count = write_files(tmp_path, MOST_TYPES)
    assert len(read_graph(tmp_path / "coe.json").experts) == count > MOST_TYPES
    assert len(TrainingState(tmp_path).files) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"types": 0}, "types must be a positive whole number, got 0"),
        ({"types": 10**9}, "types is 1000000000, expected at most 100000: each has a"),
        ({"width": -1}, "width must be a positive whole number, got -1"),
        ({"decay": 0.0}, "decay must be positive, got 0"),
        ({"types": 3, "trained_types": 4}, "trained_types is 4 of 3 types; lower it"),
        ({"types": 6, "detectors": 3}, "detectors is 3, but only 2 of 6 types go on"),
        ({"detectors": 0}, "detectors must be a positive whole number, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BoardOptions(**options)


def test_recipes_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="steps must be a positive whole number"):
        Recipe(steps=0)
    with pytest.raises(ConfigError, match="learning_rate must be positive, got -1"):
        Recipe(learning_rate=-1.0)
