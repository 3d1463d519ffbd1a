"""The paper's boards with small networks that compute, for live runs at reduced size.

Weights are random, so verdicts mean nothing. Heads of classifiers are set to find
nothing wrong: then all requests go on that would, and speed is that of the task.
"""

import dataclasses
from pathlib import Path

from moe_edge.papers.coserve.coe.models import get_network, make_architecture
from moe_edge.papers.coserve.coe.store import write_experts
from moe_edge.papers.coserve.workload.board import SHAPE
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph, write_graph
from moe_edge.papers.coserve.workload.coe_tasks import (
    CLASSIFIER,
    DECAY,
    TASKS,
    board_graph,
)

SURE = 1e3  # bias of "ok": above what random weights give


def write_board(
    folder: Path, task: str, seed: int, decay: float = DECAY, most_types: int = 1000
) -> Path:
    """Writes the board of a task with weights; returns the path of its `coe.json`.

    Args:
      most_types: of components, for tests.
    """
    board = TASKS[task].board
    types = min(TASKS[task].types, most_types)
    drawn = board_graph(types, 2 * seed + board, decay)
    architectures = {
        "classifier": make_architecture("board_resnet", {}, SHAPE, ("ok", "damaged")),
        "detector": make_architecture(
            "board_detector", {}, SHAPE, ("ok", "misaligned", "wrong_polarity")
        ),
    }
    experts, records = [], {}
    for number, expert in enumerate(drawn.experts):
        kind = "classifier" if expert.architecture == CLASSIFIER else "detector"
        network, file = get_network(architectures[kind]), f"experts/{expert.id}.bin"
        arrays = network.init_arrays([seed, board, number])
        if kind == "classifier":
            arrays["head.bias"][0] = SURE
        records[file] = network.pack(arrays)
        experts.append(dataclasses.replace(expert, architecture=kind, file=file))
    hashes = write_experts(folder, records)
    experts = [dataclasses.replace(e, sha256=hashes[e.file]) for e in experts]
    graph = CoeGraph(
        architectures, experts, drawn.rules, drawn.follow, drawn.frequencies
    )
    write_graph(folder / "coe.json", graph)
    return folder / "coe.json"
