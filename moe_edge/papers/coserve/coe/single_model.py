"""One network for all components, beside the collaboration of small ones.

It has a classifier's architecture, gives every verdict itself, and is trained for as
many steps as all experts together, on the same kinds of images.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moe_edge.core.progress import say
from moe_edge.papers.coserve.coe.accuracy import told, write_accuracy
from moe_edge.papers.coserve.coe.board_options import WIDER, BoardOptions, Recipe
from moe_edge.papers.coserve.coe.board_plan import CLASSIFIER, DTYPE, board_plan
from moe_edge.papers.coserve.coe.board_training import (
    GRAPH_FILE,
    TrainingState,
    file_of,
    remove_old,
    spec_of,
)
from moe_edge.papers.coserve.coe.models import VERDICTS, get_network, make_architecture
from moe_edge.papers.coserve.coe.store import ExpertStore
from moe_edge.papers.coserve.coe.train_expert import Part, held_out, verdicts_of
from moe_edge.papers.coserve.workload.board import SHAPE, draw
from moe_edge.papers.coserve.workload.coe_graph import (
    OK,
    Architecture,
    CoeGraph,
    read_graph,
)

IMAGES = 512  # of a component
SEED = 1_000_000  # of its images: others than those of single experts

Judge = Callable[[str, np.ndarray], list[str]]


def train_singles(
    folder: Path, options: BoardOptions, recipe: Recipe, seed: int, names: Sequence[str]
) -> None:
    """Trains those of WIDER that are named, unless that was done; writes accuracy.json.

    It holds shares of right verdicts on held-out images of the trained components, half
    of them damaged: of these, and of those that were trained before in the same way.
    """
    plan = board_plan(options, seed)
    parts = [part for own in plan.parts for part in own]
    steps = recipe.steps * sum(1 for own in plan.parts if own)
    longer = dataclasses.replace(recipe, steps=steps)
    graph, state = read_graph(folder / GRAPH_FILE), TrainingState(folder)
    judges = {"collaboration": collaboration_judge(graph, folder)}
    for name, factor in WIDER.items():
        width = {"width": factor * options.width}
        made = make_architecture(CLASSIFIER, width, SHAPE, VERDICTS, DTYPE)
        if name in names:
            known = state.train(name, made, parts, longer, seed)
        else:
            known = state.find(name, spec_of(made, parts, longer, seed))
        if known is not None:
            judges[name] = single_judge(made, folder / file_of(name, known.sha256))
    components = parts[: options.num_trained]
    found = {name: accuracy(one, components, IMAGES) for name, one in judges.items()}
    shares = dict.fromkeys(("collaboration", *WIDER)) | found
    say(told(shares))
    write_accuracy(folder, graph, shares)
    remove_old(folder, graph, state)


def accuracy(judge: Judge, parts: Sequence[Part], images: int) -> float:
    """Share of held-out images whose defect is found, or that pass where sound.

    Args:
      images: of each part.
    """
    right = []
    for number, part in enumerate(parts):
        shown = held_out(part, images, SEED + number)
        verdicts = judge(part.component, draw(part.component, shown))
        for image, verdict in zip(shown, verdicts, strict=True):
            right.append(verdict == (image["defect"] or OK))
    return float(np.mean(right))


def collaboration_judge(graph: CoeGraph, folder: Path) -> Judge:
    """A component's own expert, and whom it goes on to."""
    store = ExpertStore(graph, folder)

    def by_expert(expert: int, images_NHWC: np.ndarray) -> list[str]:
        architecture = graph.architectures[graph.experts[expert].architecture]
        network = get_network(architecture)
        return verdicts_of(network, store.record(expert), images_NHWC)

    def judge(component: str, images_NHWC: np.ndarray) -> list[str]:
        first = graph.rules[component]
        verdicts = by_expert(first, images_NHWC)
        if first not in graph.follow:
            return verdicts
        then = by_expert(graph.follow[first], images_NHWC)
        both = zip(verdicts, then, strict=True)
        return [second if verdict == OK else verdict for verdict, second in both]

    return judge


def single_judge(architecture: Architecture, path: Path) -> Judge:
    """One network, whatever the component."""
    network, record_B = get_network(architecture), np.fromfile(path, np.uint8)
    return lambda component, images: verdicts_of(network, record_B, images)
