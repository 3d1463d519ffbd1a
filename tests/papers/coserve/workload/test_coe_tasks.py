"""Boards, tasks and the file of requests."""

import json
import re

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph, Expert
from moe_edge.papers.coserve.workload.coe_tasks import (
    TASKS,
    CoeRequest,
    board_graph,
    board_requests,
    read_requests,
    task_graph,
    task_requests,
    write_requests,
)


def make_task(name, seed=0):
    graph = task_graph(name, seed)
    return graph, task_requests(name, graph, seed=seed)


@pytest.mark.parametrize("name", TASKS)
def test_task_has_the_papers_numbers(name):
    graph, requests = make_task(name)
    task = TASKS[name]
    assert len(graph.experts) == task.types + 30 and len(graph.rules) == task.types
    assert len(graph.follow) == round(0.35 * task.types)
    assert {graph.experts[e].architecture for e in graph.follow} == {"resnet101"}
    assert min(graph.follow.values()) >= task.types
    assert len(requests) == task.requests
    assert requests[-1].arrival_s == pytest.approx(0.004 * (task.requests - 1))
    damaged = np.mean([request.is_damaged for request in requests])
    assert 0.02 < damaged < 0.04
    # exp(-i/32): the most frequent type has 1 - exp(-1/32) of all requests.
    assert max(graph.frequencies.values()) == pytest.approx(0.03077, rel=1e-3)


def test_tasks_of_a_board_share_it_and_start_alike():
    (board, first), (same, longer) = make_task("a1"), make_task("a2")
    assert board.follow == same.follow and longer[: len(first)] == first
    assert make_task("a1", seed=1)[1] != first


def test_requests_follow_the_frequencies():
    graph = board_graph(3, decay=1.0)
    requests = board_requests(graph, 4000, 0.1)
    names, counts = np.unique([r.component for r in requests], return_counts=True)
    expected = [graph.frequencies[name] for name in names]
    np.testing.assert_allclose(counts / 4000, expected, atol=0.03)


def test_board_without_frequencies_has_no_requests():
    with pytest.raises(ConfigError, match="no frequencies to draw"):
        board_requests(CoeGraph({}, [Expert("a", "n")], {"x": 0}, {}), 1)
    with pytest.raises(ConfigError, match="unknown task 'c1'; known: a1, a2, b1, b2"):
        task_graph("c1")
    with pytest.raises(ConfigError, match="unknown task 'c1'"):
        task_requests("c1", board_graph(2))


def test_requests_read_back_as_written(tmp_path):
    requests = [
        CoeRequest(0, 0.0, "x", {"seed": 1, "defect": None}),
        CoeRequest("one", 0.5, "y", "images/one.npy"),
        CoeRequest(2, 0.5, "x", {"seed": 2, "defect": "damaged"}),
    ]
    write_requests(tmp_path / "requests.jsonl", requests)
    back = read_requests(tmp_path / "requests.jsonl")
    assert back == requests
    assert [request.is_damaged for request in back] == [False, False, True]


ROW = {"id": 1, "arrival_s": 1.0, "component": "x", "image": "a.npy"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "FILE holds no request"),
        ([ROW, ROW], "FILE:2: id 1 occurs twice"),
        ([ROW, ROW | {"id": 2, "arrival_s": 0.5}], "FILE:2: arrival_s is 0.5, expe"),
        ([ROW | {"arrival_s": float("nan")}], "FILE:1 is not valid JSON: NaN is no"),
        ([ROW | {"arrival_s": float("inf")}], "FILE:1 is not valid JSON: Infinity is"),
        ([ROW, {"id": 2}], "FILE:2 lacks arrival_s"),
        ([ROW | {"component": 3}], "FILE:1: component is 3, expected a text"),
        ([ROW | {"image": {"seed": 1}}], "FILE:1: image is {'seed': 1}, expected"),
        (
            [ROW, ROW | {"id": 2, "image": {"seed": -1, "defect": None}}],
            "FILE:2: seed of the image is -1, expected 0 or more",
        ),
        (
            [ROW | {"image": {"seed": 1, "defect": "burnt"}}],
            "FILE:1: defect is 'burnt'",
        ),
    ],
)
def test_wrong_requests_are_refused_with_their_line(rows, message, tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = message.replace("FILE", str(path))
    with pytest.raises(RequestError, match=re.escape(message)):
        read_requests(path)


def test_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(ROW) + "\n{oops\n")
    with pytest.raises(
        RequestError, match=f"{path}:2 is not valid JSON: Expecting property name"
    ):
        read_requests(path)


def test_misplaced_components_are_those_that_a_detector_sees():
    graph = task_graph("a1")
    plain = board_requests(graph, 800)
    found = board_requests(graph, 800, misplaced=0.5)
    wrong = [r for r in found if r.drawn in ("misaligned", "wrong_polarity")]
    seen = [r for r in plain if graph.rules[r.component] in graph.follow]
    assert all(graph.rules[r.component] in graph.follow for r in wrong)
    assert 0.4 * len(seen) < len(wrong) < 0.6 * len(seen)
    assert {r.drawn for r in wrong} == {"misaligned", "wrong_polarity"}
    # All else stays: those that are told to lie wrong were sound.
    for before, after in zip(plain, found, strict=True):
        assert before.image["seed"] == after.image["seed"]
        assert after == before or before.drawn == "ok"
