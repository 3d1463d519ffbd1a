"""Trains a board expert by expert, and notes what is done so that a run can go on."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.coe.board_options import BoardOptions, Recipe
from moe_edge.coe.board_plan import Plan, board_plan
from moe_edge.coe.models import get_network
from moe_edge.coe.store import file_sha256, write_experts
from moe_edge.coe.train_expert import Part, accuracy_of, train_network
from moe_edge.core.files import read_json, write_text
from moe_edge.core.progress import counter
from moe_edge.training.control import say
from moe_edge.workload.coe_graph import Architecture, write_graph

GRAPH_FILE, STATE_FILE = "coe.json", "training.json"
COPY_NOISE = 0.05  # of a copy's weights, beside what they are

Facts = Mapping[str, Any]


class TrainingState:
    """Of every network in a folder, how it was trained: `training.json`."""

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / STATE_FILE
        self._of = read_json(self._path) if self._path.is_file() else {}

    def find(self, file: str, spec: str) -> Facts | None:
        """What is known of a file of such a training; None: it is to be trained."""
        known, path = self._of.get(file), self._folder / file
        if known is None or known["spec"] != spec or not path.is_file():
            return None
        return known if file_sha256(path) == known["sha256"] else None

    def train(
        self,
        file: str,
        architecture: Architecture,
        parts: Sequence[Part],
        recipe: Recipe,
        seed: int,
    ) -> Facts:
        """Trains a network into a file, unless that was done.

        Returns:
          spec; sha256; accuracy, of the stored weights on held-out images; steps;
          seconds.
        """
        spec = _digest(dataclasses.asdict(architecture), parts, vars(recipe), seed)
        if (known := self.find(file, spec)) is not None:
            return known
        network, started = get_network(architecture), time.monotonic()
        with counter(f"training {file}", recipe.steps) as count:
            arrays = train_network(network, parts, recipe, seed, count)
        record_B = network.pack(arrays)
        seconds = time.monotonic() - started
        facts = {
            "spec": spec,
            "sha256": write_experts(self._folder, {file: record_B})[file],
            "accuracy": accuracy_of(network, record_B, parts, seed),
            "steps": recipe.steps,
            "seconds": round(seconds, 2),
        }
        self._of[file] = facts
        write_text(self._path, json.dumps(self._of, indent=1) + "\n")
        return facts


def train_experts(
    folder: Path, options: BoardOptions, recipe: Recipe, seed: int
) -> list[Facts]:
    """Trains or copies all experts, then writes the graph.

    Returns:
      What is known of each trained one.
    """
    state, plan = TrainingState(folder), board_plan(options, seed)
    graph, told, hashes = plan.graph, [], {}
    trained = [e for e, expert in enumerate(graph.experts) if expert.trained]
    for e in trained:
        expert = graph.experts[e]
        architecture, parts = graph.architectures[expert.architecture], plan.parts[e]
        facts = state.train(expert.file, architecture, parts, recipe, seed + e)
        hashes[e] = facts["sha256"]
        told.append(facts)
        say(
            f"{len(told)}/{len(trained)} {expert.id}: accuracy "
            f"{facts['accuracy']:.4f}, {facts['seconds']:.1f} s"
        )
    for e in sorted(set(range(len(graph.experts))) - set(trained)):
        hashes[e] = _copy(folder, plan, e, seed)
    experts = [
        dataclasses.replace(expert, sha256=hashes[e])
        for e, expert in enumerate(graph.experts)
    ]
    partial = folder / f".{GRAPH_FILE}.partial"
    write_graph(partial, dataclasses.replace(graph, experts=experts))
    partial.rename(folder / GRAPH_FILE)
    return told


def _copy(folder: Path, plan: Plan, expert: int, seed: int) -> str:
    """Writes weights of an expert that is not trained; returns their sha256."""
    one, origin = plan.graph.experts[expert], plan.origin[expert]
    network = get_network(plan.graph.architectures[one.architecture])
    arrays = network.init_arrays([seed, expert])
    if origin != expert:
        path = folder / plan.graph.experts[origin].file
        rng = np.random.default_rng([seed, expert])
        for name, kept in network.unpack(np.fromfile(path, np.uint8)).items():
            arrays[name] = kept * (1 + COPY_NOISE * rng.standard_normal(kept.shape))
    return write_experts(folder, {one.file: network.pack(arrays)})[one.file]


def _digest(*said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
