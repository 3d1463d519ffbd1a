"""Trains a board expert by expert, and notes what is done so that a run can go on.

Files of weights are named by what they hold, and never change. So the graph of a
folder, which comes last, always finds its own weights, whatever is trained beside it.
"""

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json
from moe_edge.core.progress import counter, progress, say
from moe_edge.core.typed import built
from moe_edge.papers.coserve.coe.accuracy import ACCURACY_FILE, read_accuracy
from moe_edge.papers.coserve.coe.board_options import BoardOptions, Recipe
from moe_edge.papers.coserve.coe.board_plan import Plan, board_plan
from moe_edge.papers.coserve.coe.models import get_network
from moe_edge.papers.coserve.coe.store import write_experts
from moe_edge.papers.coserve.coe.train_expert import Part, accuracy_of, train_network
from moe_edge.papers.coserve.workload.coe_graph import (
    Architecture,
    CoeGraph,
    write_graph,
)
from moe_edge.papers.coserve.workload.coe_weights import file_sha256

GRAPH_FILE, STATE_FILE = "coe.json", "training.json"
COPY_NOISE = 0.05  # of a copy's weights, beside what they are
# Files that training writes, or wrote: networks, finished or not.
_WRITTEN = re.compile(
    r"\.?((classifier|detector)_\d+|single|single_wide)(-[0-9a-f]{16})?"
    r"\.bin(\.partial)?"
)


@dataclasses.dataclass(frozen=True)
class Facts:
    """How a network was trained.

    Attributes:
      spec: of its training; sha256: of its file.
      accuracy: of the stored weights on held-out images.
      steps, seconds: that it took.
    """

    spec: str
    sha256: str
    accuracy: float
    steps: int
    seconds: float


def file_of(name: str, sha256: str) -> str:
    """The file of a network's weights, in the folder."""
    return f"{name}-{sha256[:16]}.bin"


class TrainingState:
    """Of every network in a folder, how it was trained: `training.json`.

    Raises:
      CheckpointError: the file has another form.
    """

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / STATE_FILE
        self._of = _read(self._path) if self._path.is_file() else {}

    @property
    def files(self) -> set[str]:
        """Of all networks."""
        return {file_of(name, facts.sha256) for name, facts in self._of.items()}

    def find(self, name: str, spec: str) -> Facts | None:
        """What is known of a network of such a training; None: it is to be trained."""
        known = self._of.get(name)
        if known is None or known.spec != spec:
            return None
        return known if _holds(self._folder, name, known.sha256) else None

    def train(
        self,
        name: str,
        architecture: Architecture,
        parts: Sequence[Part],
        recipe: Recipe,
        seed: int,
    ) -> Facts:
        """Trains a network into its file, unless that was done."""
        spec = spec_of(architecture, parts, recipe, seed)
        if (known := self.find(name, spec)) is not None:
            return known
        network, started = get_network(architecture), time.monotonic()
        with counter(f"training {name}", recipe.steps) as count:
            arrays = train_network(network, parts, recipe, seed, count)
        record_B = network.pack(arrays)
        seconds = time.monotonic() - started
        sha256 = _write(self._folder, name, record_B)
        accuracy = accuracy_of(network, record_B, parts, seed)
        facts = Facts(spec, sha256, accuracy, recipe.steps, round(seconds, 2))
        self._of[name] = facts
        stored = {name: vars(facts) for name, facts in self._of.items()}
        write_text(self._path, json.dumps(stored, indent=1) + "\n")
        return facts


def spec_of(
    architecture: Architecture, parts: Sequence[Part], recipe: Recipe, seed: int
) -> str:
    """What a training is: of another one the network is another."""
    return _digest(dataclasses.asdict(architecture), parts, vars(recipe), seed)


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
        facts = state.train(_name(plan, e), architecture, parts, recipe, seed + e)
        hashes[e] = facts.sha256
        told.append(facts)
        say(
            f"{len(told)}/{len(trained)} {expert.id}: accuracy "
            f"{facts.accuracy:.4f}, {facts.seconds:.1f} s"
        )
    copied = sorted(set(range(len(graph.experts))) - set(trained))
    for e in progress(copied, "experts copied"):
        hashes[e] = _copy(folder, plan, e, seed, hashes)
    experts = [
        dataclasses.replace(
            expert, file=file_of(_name(plan, e), hashes[e]), sha256=hashes[e]
        )
        for e, expert in enumerate(graph.experts)
    ]
    graph = dataclasses.replace(graph, experts=experts)
    try:
        read_accuracy(folder, graph)
    except CheckpointError:  # of other weights
        (folder / ACCURACY_FILE).unlink()
    partial = folder / f".{GRAPH_FILE}.partial"
    write_graph(partial, graph)
    partial.rename(folder / GRAPH_FILE)
    remove_old(folder, graph, state)
    return told


def remove_old(folder: Path, graph: CoeGraph, state: TrainingState) -> None:
    """Deletes networks that neither a folder's graph nor its state names any more."""
    named = {expert.file for expert in graph.experts} | state.files
    for path in [*folder.iterdir(), *(folder / "experts").iterdir()]:
        file = path.relative_to(folder).as_posix()
        if _WRITTEN.fullmatch(path.name) and file not in named:
            path.unlink()


def _read(path: Path) -> dict[str, Facts]:
    given = read_json(path, CheckpointError, max_bytes=LARGE_FILE_BYTES)
    try:
        if not isinstance(given, dict):
            raise ConfigError(f"{path} is {given!r:.60}, expected names and values")
        return {
            name: built(f"{path}: {name!r}", Facts, it) for name, it in given.items()
        }
    except ConfigError as error:
        raise CheckpointError(
            f"{error}; delete it to train all experts again"
        ) from error


def _name(plan: Plan, expert: int) -> str:
    return f"experts/{plan.graph.experts[expert].id}"


def _copy(
    folder: Path, plan: Plan, expert: int, seed: int, hashes: dict[int, str]
) -> str:
    """Writes weights of an expert that is not trained; returns their sha256.

    Args:
      hashes: of those that are trained.
    """
    one, origin = plan.graph.experts[expert], plan.origin[expert]
    network = get_network(plan.graph.architectures[one.architecture])
    arrays = network.init_arrays([seed, expert])
    if origin != expert:
        path = folder / file_of(_name(plan, origin), hashes[origin])
        rng = np.random.default_rng([seed, expert])
        for name, kept in network.unpack(np.fromfile(path, np.uint8)).items():
            arrays[name] = kept * (1 + COPY_NOISE * rng.standard_normal(kept.shape))
    return _write(folder, _name(plan, expert), network.pack(arrays))


def _write(folder: Path, name: str, record_B: np.ndarray) -> str:
    """Writes weights, unless their file is there; returns their sha256."""
    sha256 = hashlib.sha256(memoryview(record_B)).hexdigest()
    if not _holds(folder, name, sha256):
        write_experts(folder, {file_of(name, sha256): record_B})
    return sha256


def _holds(folder: Path, name: str, sha256: str) -> bool:
    """Whether a network's file is there, and whole."""
    path = folder / file_of(name, sha256)
    return path.is_file() and file_sha256(path) == sha256


def _digest(*said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
