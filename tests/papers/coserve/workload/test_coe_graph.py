"""The graph of a collaboration of experts: what is read, computed and refused."""

import copy
import json
import re

import numpy as np
import pytest

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.papers.coserve.workload.coe_graph import (
    parse_graph,
    read_graph,
    write_graph,
)

NET = {
    "module": "resnet",
    "options": {"width": 8},
    "input_shape": [32, 32, 3],
    "outputs": 2,
    "record_bytes": 640,
    "dtype": "bfloat16",
}


def expert(name, architecture="small"):
    return {
        "id": name,
        "architecture": architecture,
        "file": f"{name}.bin",
        "sha256": "00",
        "trained": True,
    }


GRAPH = {
    "format_version": 1,
    "architectures": {"small": NET, "large": NET | {"record_bytes": 1280}},
    "experts": [expert("a"), expert("b"), expert("c", "large"), expert("d")],
    "rules": [
        {"component": "x", "expert": "a"},
        {"component": "y", "expert": "b"},
        {"component": "z", "expert": "b"},
    ],
    "dependencies": [
        {"from": "a", "when": "ok", "to": "c"},
        {"from": "b", "when": "ok", "to": "c"},
    ],
    "frequencies": {"x": 1, "y": 2.0, "z": 1},
    "probabilities": None,
}


def changed(**changes):
    return copy.deepcopy(GRAPH) | changes


def test_graph_says_sizes_rules_dependencies_and_computes_probabilities():
    graph = parse_graph(GRAPH)
    assert graph.bytes_E.tolist() == [640, 640, 1280, 640]
    assert graph.rules == {"x": 0, "y": 1, "z": 1} and graph.follow == {0: 2, 1: 2}
    np.testing.assert_allclose(graph.probability_E(), [0.25, 0.75, 1.0, 0.0])


def test_given_probabilities_come_first_and_a_sample_last():
    given = parse_graph(changed(probabilities={"b": 0.5, "d": 0.25}))
    np.testing.assert_array_equal(given.probability_E(), [0, 0.5, 0, 0.25])
    unknown = parse_graph(changed(frequencies=None))
    # Three of four requests have a rule: the fourth one will fail.
    sample = ["x", "y", "y", "without"]
    np.testing.assert_allclose(unknown.probability_E(sample), [0.25, 0.5, 0.75, 0])
    with pytest.raises(ConfigError, match="neither frequencies nor probabilities"):
        unknown.probability_E(["without"])


def test_graph_reads_back_as_it_was_written(tmp_path):
    graph = parse_graph(changed(probabilities={"a": 0.5}))
    write_graph(tmp_path / "coe.json", graph)
    back = read_graph(tmp_path / "coe.json")
    assert (back.experts, back.rules) == (graph.experts, graph.rules)
    assert (back.follow, back.frequencies) == (graph.follow, graph.frequencies)
    assert back.architectures["large"].record_bytes == 1280
    np.testing.assert_array_equal(back.probabilities, graph.probabilities)


def link(first, then, **more):
    return {"from": first, "when": "ok", "to": then} | more


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "G has format_version 2, this program reads 1"),
        ({"experts": []}, "G has no experts"),
        ({"experts": [expert("a"), expert("a")]}, "expert id 'a' occurs twice"),
        (
            {"experts": [expert("a", "huge")]},
            "unknown architecture of expert 'a' in G 'huge'; known: large, small",
        ),
        ({"experts": [{"id": "a"}]}, "G: expert 0 lacks architecture"),
        (
            {"experts": [expert("a") | {"file": "../../etc/passwd"}]},
            "G: file of expert 'a' is '../../etc/passwd', expected a path below the",
        ),
        (
            {"experts": [expert("a") | {"file": "/etc/passwd"}]},
            "G: file of expert 'a' is '/etc/passwd', expected a path below the folder",
        ),
        ({"rules": [{"component": "x"}]}, "G: rule 0 lacks expert"),
        (
            {"rules": [{"component": "x", "expert": "q"}]},
            "the rule of component 'x' names expert 'q', which is not among the 4",
        ),
        ({"rules": GRAPH["rules"] * 2}, "component 'x' has two rules"),
        ({"dependencies": [{"from": "a"}]}, "dependency 0 is {'from': 'a'}"),
        (
            {"dependencies": [link("a", "c"), link("a", "q")]},
            "dependency 1 names expert 'q'",
        ),
        ({"dependencies": [link("a", "c", when="bad")]}, "and when 'ok'"),
        ({"dependencies": [link("a", ["c"])]}, "dependency 0 holds"),
        ({"dependencies": [link("a", "c")] * 2}, "expert 'a' has two dependencies"),
        ({"dependencies": [link("a", "a")]}, "a -> a are a cycle"),
        ({"dependencies": [link("a", "b"), link("b", "a")]}, "a -> b -> a are a cycle"),
        (
            {"dependencies": [link("a", "b"), link("b", "c")]},
            "a -> b -> c are too deep, expected preliminary -> subsequent",
        ),
        (
            {"dependencies": [link("a", "b"), link("b", "c"), link("c", "b")]},
            "a -> b -> c -> b are a cycle",
        ),
        ({"frequencies": {"x": -0.5}}, "frequencies: 'x' has -0.5, expected 0 or more"),
        ({"frequencies": {"x": float("nan")}}, "frequencies: 'x' has nan"),
        ({"frequencies": {"x": 0.0, "y": 0}}, "G: frequencies sum to 0"),
        ({"frequencies": {"x": "1"}}, "G: frequencies: 'x' is '1', expected a number"),
        ({"probabilities": {"a": None}}, "G: probabilities: 'a' is None, expected a n"),
        ({"architectures": {"small": 3}}, "G: architectures: 'small' is 3, expected"),
        ({"frequencies": {"w": 1}}, "component 'w' has a frequency and no rule"),
        ({"probabilities": {"a": float("inf")}}, "probabilities: 'a' has inf"),
        ({"probabilities": {"a": 0}}, "G: probabilities sum to 0"),
        ({"probabilities": {"q": 1}}, "a probability names expert 'q'"),
        (
            {"architectures": {"small": NET | {"record_bytes": 0}}},
            "record_bytes must be a positive whole number, got 0",
        ),
    ],
)
def test_wrong_graph_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        parse_graph(changed(**changes), "G")
    assert "\n" not in str(refused.value)


def test_file_that_is_no_graph_is_refused(tmp_path):
    path = tmp_path / "coe.json"
    with pytest.raises(CheckpointError, match=f"cannot read {path}"):
        read_graph(path)
    path.write_text(json.dumps({"format_version": 1}))
    with pytest.raises(ConfigError, match=f"{path} lacks architectures"):
        read_graph(path)
