"""The board that comes with the package."""

import numpy as np
import pytest

from moe_edge.papers.coserve.coe.accuracy import read_accuracy
from moe_edge.papers.coserve.coe.case import DEMO_BOARD, CoeWork
from moe_edge.papers.coserve.coe.single_model import accuracy, collaboration_judge
from moe_edge.papers.coserve.coe.store import ExpertStore
from moe_edge.papers.coserve.coe.train_expert import classifier_part, detector_part
from moe_edge.papers.coserve.workload.coe_graph import read_graph


@pytest.fixture(scope="module")
def graph():
    return read_graph(DEMO_BOARD / "coe.json")


def test_demo_board_is_whole_and_small(graph):
    ExpertStore(graph, DEMO_BOARD).check()
    names = [expert.architecture for expert in graph.experts]
    assert (names.count("board_resnet"), names.count("board_detector")) == (24, 4)
    assert all(expert.trained for expert in graph.experts)
    assert sum(p.stat().st_size for p in DEMO_BOARD.rglob("*") if p.is_file()) <= 6e6


def test_demo_tells_the_accuracies_that_coserve_repeats(graph):
    found = read_accuracy(DEMO_BOARD, graph)
    assert found["collaboration"] >= 0.98
    assert 1 - found["single"] >= 2 * (1 - found["collaboration"])
    assert found["single_wide"] is None  # not trained for this board


def test_demo_requests_use_every_expert_and_defect():
    graph, requests = CoeWork(graph="demo", requests="demo").build("reduced", 0)
    assert {request.component for request in requests} == set(graph.rules)
    drawn = {request.drawn for request in requests}
    assert drawn == {"ok", "damaged", "misaligned", "wrong_polarity"}
    used = graph.uses_E({request.component: 1 for request in requests})
    assert np.all(used > 0)


def test_demo_experts_judge_images_that_they_never_saw(graph):
    """The bar is 98 %; these are few images, and one wrong one is half a per cent."""
    judge = collaboration_judge(graph, DEMO_BOARD)
    followed = [f"component_{n}" for n in graph.follow][:3]
    parts = [classifier_part(name, followed=True) for name in followed]
    parts += [detector_part(followed[0]), classifier_part("component_0", False)]
    assert accuracy(judge, parts, images=128) >= 0.97
    assert accuracy(lambda _, shown: ["ok"] * len(shown), parts, images=128) < 0.6
