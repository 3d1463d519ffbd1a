"""Costs of steps: between and beyond the points of a table."""

import dataclasses
import json

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.step_costs import (
    TIMES,
    CostTable,
    StepCosts,
    read_step_costs,
)

TABLE = CostTable((1, 2, 4), (8, 32), [[2, 5], [3, 6], [7, 10]])


@pytest.mark.parametrize(
    "size, k, seconds",
    [
        *((1, 8, 2), (2, 32, 6), (4, 32, 10), (1, 20, 3.5), (3, 8, 5), (3, 20, 6.5)),
        *((8, 8, 15), (0.5, 8, 2), (2, 40, 7), (2, 4, 2.5), (0, 8, 0)),
    ],
)
def test_table_is_linear_between_and_beyond_its_points(size, k, seconds):
    assert TABLE(size, k) == pytest.approx(seconds)


def test_table_of_one_point_says_the_same_everywhere():
    assert CostTable((4,), (8, 32), [[1, 3]])(9, 20) == 2
    assert CostTable((4,), (8,), [[5]])(1, 2) == 5


SHAPES = [[1, 32, 64, 1.0], [1, 64, 64, 2.0], [1, 64, 256, 5.0], [4, 32, 64, 3.0]]


def test_prompts_in_another_shape_than_one_cost_the_difference():
    table = CostTable((16, 32), (8, 9), [[2, 2], [4, 4]])
    costs = StepCosts(TABLE, table, "here", shapes=SHAPES)
    assert costs.prefill_s(24, 8) == costs.prefill_s(24, 8, (1, 32, 64)) == 3
    assert costs.prefill_s(24, 8, (4, 32, 64)) == 3 + 2  # four rows beside one
    assert costs.prefill_s(40, 8, (4, 32, 64)) == 5 + 1  # one would be padded to 64
    assert costs.prefill_s(24, 8, (1, 64, 256)) == 3 + 4  # the end of a long prompt
    assert costs.prefill_s(90, 8, (1, 64, 256)) == costs.prefill_s(90, 8)  # too long
    pairs = dataclasses.replace(costs, shapes=[[2, 32, 64, 1.0], [4, 32, 64, 3.0]])
    assert pairs.prefill_s(24, 8, (4, 32, 64)) == 3 + 2  # one runs in two rows
    # Unknown: twice the positions of the nearest, which is of this capacity.
    assert costs.prefill_s(24, 8, (4, 64, 64)) == 3 + 6 - 1
    assert costs.prefill_s(24, 8, (2, 64, 256)) == 3 + 10 - 1


def test_rows_in_another_batch_than_the_least_cost_the_difference():
    batches = [[1, 1, 64, 1.0], [2, 1, 64, 2.0], [2, 1, 256, 6.0]]
    costs = StepCosts(TABLE, TABLE, "here", batches=batches)
    assert costs.decode_s(1, 8) == costs.decode_s(1, 8, (1, 1, 64)) == 2
    assert costs.decode_s(1, 8, (2, 1, 64)) == 2 + 1  # others have left
    assert costs.decode_s(2, 8, (2, 1, 256)) == 3 + 4  # somebody needs more
    assert costs.decode_s(9, 8, (2, 1, 64)) == costs.decode_s(9, 8)
    assert costs.decode_s(2, 8, (4, 1, 256)) == 3 + 12 - 2  # unknown


@pytest.mark.parametrize("shape", [[1, 2, 3], [1, 2, 3, 0], [1, 2, -3, 4.0]])
def test_shapes_that_are_none_are_refused(shape):
    with pytest.raises(ConfigError, match="a shape of step costs is .*, expected rows"):
        StepCosts(TABLE, TABLE, "here", shapes=[shape])


@pytest.mark.parametrize("name", TIMES)
def test_negative_times_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} of step costs must be 0 or more"):
        StepCosts(TABLE, TABLE, "here", **{name: -1.0})


def test_costs_survive_their_file(tmp_path):
    costs = StepCosts(TABLE, CostTable((16, 32), (8, 9), [[1, 2], [3, 4]]), "here")
    costs = dataclasses.replace(costs, shapes=SHAPES, changed_s=0.5, moved_s=0.25)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"step_costs": costs.to_json() | {"held_out": []}}))
    read = read_step_costs(path)
    assert (read.decode_s(3, 20), read.prefill_s(24, 8)) == (6.5, 2)
    assert (read.changed_s, read.moved_s) == (0.5, 0.25)
    assert read.source == "here" and read.prefill_s(24, 8, (4, 32, 64)) == 2 + 2


def test_files_without_costs_are_refused(tmp_path):
    path = tmp_path / "machine.json"
    with pytest.raises(FileNotFoundError, match="--costs .* does not exist; moe-edge "):
        read_step_costs(path)
    for text, message in (
        ("{", "is not valid JSON"),
        ("[1]", "has no step_costs"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"machine.json {message}"):
            read_step_costs(path)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"sizes": [2, 1]},
            r"sizes of a cost table are \[2, 1\], expected numbers abo",
        ),
        ({"ks": []}, r"ks of a cost table are \[\], expected numbers above 0"),
        ({"sizes": [0, 1]}, r"sizes of a cost table are \[0, 1\]"),
        ({"seconds": [[1, 1]]}, r"has rows of \[2\] seconds, expected 2 rows of 2"),
        ({"seconds": [[1, 1], [1, 0]]}, "seconds of a cost table must be pos.*got 0"),
        ({"seconds": [[1, 1], [1, "x"]]}, "seconds.* is .*'x'.*, expected"),
        ({"sizes": "12"}, "decode: sizes is '12', expected a list"),
    ],
)
def test_costs_that_are_none_are_refused(change, message):
    good = {"sizes": [1, 2], "ks": [8, 9], "seconds": [[1, 2], [3, 4]]}
    given = {"decode": good | change, "prefill": good, "source": ""}
    with pytest.raises(ConfigError, match=message):
        StepCosts.of_json(given)


def test_a_file_without_costs_is_refused():
    with pytest.raises(ConfigError, match="step_costs is None, expected names and val"):
        StepCosts.of_json(None)
    with pytest.raises(ConfigError, match="step_costs: decode is None, expected names"):
        StepCosts.of_json({"prefill": {}})
