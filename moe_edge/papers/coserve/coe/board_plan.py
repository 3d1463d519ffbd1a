"""Which networks a board needs, and what each of them is to be trained on.

A classifier a component type; 35 % of the types go on to a detector, which several of
them share. A larger board keeps all that a smaller one has, so training can go on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.papers.coserve.coe.board_options import BoardOptions, is_followed
from moe_edge.papers.coserve.coe.models import make_architecture
from moe_edge.papers.coserve.coe.train_expert import (
    Part,
    classifier_part,
    detector_part,
)
from moe_edge.papers.coserve.workload.board import SHAPE
from moe_edge.papers.coserve.workload.coe_graph import (
    OK,
    Architecture,
    CoeGraph,
    Expert,
)
from moe_edge.papers.coserve.workload.coe_tasks import DAMAGED, DEFECTS

CLASSIFIER, DETECTOR = "board_resnet", "board_detector"
VERDICTS = {CLASSIFIER: (OK, DAMAGED), DETECTOR: (OK, *DEFECTS[1:])}
DTYPE = "bfloat16"


class Plan(NamedTuple):
    """A board before training.

    Attributes:
      graph: experts have no file yet.
      parts: of every expert: components that it is trained on; none: it is a copy.
      origin: of every expert: who is copied; itself where it is trained.
    """

    graph: CoeGraph
    parts: Sequence[Sequence[Part]]
    origin: Sequence[int]


def board_plan(options: BoardOptions, seed: int) -> Plan:
    """Graph and training of a board.

    Args:
      seed: of the order of the frequencies.
    """
    types, count = options.types, options.num_detectors
    names = [f"component_{n}" for n in range(types)]
    followed = [n for n in range(types) if is_followed(n)]
    follow = {n: types + place % count for place, n in enumerate(followed)}
    parts: list[list[Part]] = [
        [classifier_part(name, n in follow)] if n < options.num_trained else []
        for n, name in enumerate(names)
    ]
    for detector in range(types, types + count):
        seen = [n for n in followed if follow[n] == detector]
        parts.append([detector_part(names[n]) for n in seen if n < options.num_trained])
    origin = list(range(types + count))
    for first, end in ((0, types), (types, types + count)):
        trained = [e for e in range(first, end) if parts[e]]
        for place, e in enumerate(e for e in range(first, end) if not parts[e]):
            # A detector that nobody is trained for may have no other to copy.
            origin[e] = trained[place % len(trained)] if trained else e
    ids = [f"classifier_{n}" for n in range(types)]
    ids += [f"detector_{n}" for n in range(count)]
    experts = [
        Expert(
            id,
            CLASSIFIER if e < types else DETECTOR,
            trained=bool(parts[e]),
        )
        for e, id in enumerate(ids)
    ]
    order = np.random.default_rng(seed).permutation(types)
    share = np.exp(-order / options.decay)
    frequencies = dict(zip(names, (share / share.sum()).tolist(), strict=True))
    rules = {name: n for n, name in enumerate(names)}
    graph = CoeGraph(_architectures(options), experts, rules, follow, frequencies)
    return Plan(graph, parts, origin)


def _architectures(options: BoardOptions) -> dict[str, Architecture]:
    """Of a board; that of detectors only where there are some."""
    kinds = [CLASSIFIER, DETECTOR] if options.num_detectors else [CLASSIFIER]
    width = {"width": options.width}
    return {
        kind: make_architecture(kind, width, SHAPE, VERDICTS[kind], DTYPE)
        for kind in kinds
    }
