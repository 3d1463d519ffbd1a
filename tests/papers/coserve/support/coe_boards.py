"""Small board folders: a graph, files of random weights, requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.papers.coserve.coe.models import get_network, make_architecture
from moe_edge.papers.coserve.coe.store import write_experts
from moe_edge.papers.coserve.workload.board import SHAPE
from moe_edge.papers.coserve.workload.coe_graph import (
    Architecture,
    CoeGraph,
    Expert,
    write_graph,
)
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest, write_requests

DETECTED = ("ok", "misaligned", "wrong_polarity")


def tiny_architectures(dtype: str = "bfloat16") -> dict[str, Architecture]:
    """Both networks of boards, a few thousand weights each."""
    kinds = {"board_resnet": ("ok", "damaged"), "board_detector": DETECTED}
    return {
        name: make_architecture(name, {"width": 4}, SHAPE, outputs, dtype)
        for name, outputs in kinds.items()
    }


def tiny_graph(
    architectures: Mapping[str, Architecture], types: int = 6, detectors: int = 2
) -> CoeGraph:
    """A classifier a component; the first half of them is followed by a detector.

    Files are named `experts/ID.bin`; `write_board` fills in their sha256.
    """
    names = [(f"classifier_{n}", "board_resnet") for n in range(types)]
    names += [(f"detector_{n}", "board_detector") for n in range(detectors)]
    experts = [Expert(id, kind, f"experts/{id}.bin") for id, kind in names]
    share = 0.5 ** np.arange(types)
    return CoeGraph(
        architectures,
        experts,
        {f"component_{n}": n for n in range(types)},
        {n: types + n % detectors for n in range(types // 2)},
        {f"component_{n}": float(share[n]) for n in range(types)},
    )


def write_board(folder: Path, dtype: str = "bfloat16", **sizes: int) -> CoeGraph:
    """Writes `coe.json` and random weights, a seed each; sizes as of `tiny_graph`."""
    graph = tiny_graph(tiny_architectures(dtype), **sizes)
    records = {}
    for number, expert in enumerate(graph.experts):
        network = get_network(graph.architectures[expert.architecture])
        records[expert.file] = network.init(number)
    hashes = write_experts(folder, records)
    experts = [
        Expert(e.id, e.architecture, e.file, hashes[e.file], True)
        for e in graph.experts
    ]
    graph = CoeGraph(
        *(graph.architectures, experts, graph.rules, graph.follow, graph.frequencies)
    )
    write_graph(folder / "coe.json", graph)
    return graph


def drawn_requests(
    graph: CoeGraph, count: int = 12, period_s: float = 0.001, seed: int = 0
) -> list[CoeRequest]:
    """Requests for all components, with every defect."""
    rng = np.random.default_rng(seed)
    names, defects = list(graph.rules), (None, "damaged", *DETECTED[1:])
    return [
        CoeRequest(
            n,
            n * period_s,
            names[int(rng.integers(len(names)))],
            {"seed": n, "defect": defects[n % 4]},
        )
        for n in range(count)
    ]


def write_board_requests(folder: Path, requests: Sequence[CoeRequest]) -> Path:
    """Writes `requests.jsonl`; returns its path."""
    path = folder / "requests.jsonl"
    write_requests(path, requests)
    return path
