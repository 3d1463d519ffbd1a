"""Boards and tasks for a collaboration of experts, and `requests.jsonl`.

CoServe (section 5.1) names boards of 352 and 342 types of components, a request every
4 ms and tasks of 2,500 and 3,500 requests. It gives no frequencies. Ours are
p_i ~ exp(-i / decay) in a random order; decay 32 comes near its numbers of switches.
That 35 % of the types go on to one of 30 detectors, and that 3 % of the requests are
damaged, are assumptions of ours.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    RequestError,
    check_count,
    check_known,
    check_positive,
)
from moe_edge.core.files import check_there, write_text
from moe_edge.core.json_reader import json_lines
from moe_edge.core.typed import built
from moe_edge.papers.coserve.workload.coe_graph import (
    OK,
    Architecture,
    CoeGraph,
    Expert,
)

PERIOD_S = 0.004
DECAY = 32.0
FOLLOWED_SHARE = 0.35
DAMAGED_SHARE = 0.03
DAMAGED = "damaged"
DEFECTS = (DAMAGED, "misaligned", "wrong_polarity")
CLASSIFIER, DETECTORS = "resnet101", {"yolov5m": 20, "yolov5l": 10}
# Of the paper's networks in float32.
RECORD_BYTES = {CLASSIFIER: 178_000_000, "yolov5m": 85_000_000, "yolov5l": 186_000_000}


class Task(NamedTuple):
    """A task of the paper.

    Attributes:
      board: number of the board; types: of its components.
      requests: how many.
    """

    board: int
    types: int
    requests: int


TASKS = {
    "a1": Task(0, 352, 2500),
    "a2": Task(0, 352, 3500),
    "b1": Task(1, 342, 2500),
    "b2": Task(1, 342, 3500),
}


@dataclasses.dataclass(frozen=True)
class CoeRequest:
    """An image of one component that is to be judged.

    Attributes:
      id: unique.
      arrival_s: seconds from the start.
      component: what the image shows.
      image: path of a `.npy`, or {seed, defect} of one that is drawn; a defect is one
        of DEFECTS, or None.
    """

    id: int | str
    arrival_s: float
    component: str
    image: str | Mapping[str, Any]

    @property
    def is_damaged(self) -> bool:
        """Whether it is drawn so that its first expert should find it damaged."""
        return self.drawn == DAMAGED

    @property
    def drawn(self) -> str:
        """The verdict that it should get, if it is drawn; OK where nobody knows."""
        drawn = self.image["defect"] if isinstance(self.image, Mapping) else None
        return drawn or OK


def board_graph(
    types: int,
    seed: int = 0,
    decay: float = DECAY,
    record_bytes: Mapping[str, int] | None = None,
) -> CoeGraph:
    """A board: a classifier a type of component, and shared detectors; no weights.

    Args:
      decay: of the frequencies, in types.
      record_bytes: of each of the three networks; None: the paper's.
    """
    check_count("types", types)
    check_positive("decay", decay)
    rng = np.random.default_rng(seed)
    record_bytes = RECORD_BYTES if record_bytes is None else record_bytes
    experts = [Expert(f"{CLASSIFIER}_{n}", CLASSIFIER) for n in range(types)]
    for name, count in DETECTORS.items():
        experts += [Expert(f"{name}_{n}", name) for n in range(count)]
    share = np.exp(-rng.permutation(types) / decay)
    followed = rng.permutation(types)[: round(FOLLOWED_SHARE * types)]
    detectors = rng.integers(types, len(experts), len(followed))
    names = [f"component_{n}" for n in range(types)]
    return CoeGraph(
        {
            name: Architecture(name, {}, (224, 224, 3), None, size, "float32")
            for name, size in record_bytes.items()
        },
        experts,
        {name: n for n, name in enumerate(names)},
        dict(sorted(zip(followed.tolist(), detectors.tolist(), strict=True))),
        dict(zip(names, (share / share.sum()).tolist(), strict=True)),
    )


def board_requests(
    graph: CoeGraph,
    count: int,
    period_s: float = PERIOD_S,
    seed: int = 0,
    misplaced: float = 0.0,
) -> list[CoeRequest]:
    """Requests at equal distances, drawn by the graph's frequencies.

    Args:
      misplaced: share of what is sound, and goes on to a detector, that lies wrong.
    Raises:
      ConfigError: the graph has no frequencies.
    """
    check_count("requests", count)
    check_positive("period_s", period_s)
    if graph.frequencies is None:
        raise ConfigError("the graph has no frequencies to draw requests by")
    rng = np.random.default_rng([seed, 1])
    names = list(graph.frequencies)
    share = np.array(list(graph.frequencies.values()))
    drawn = rng.choice(len(names), count, p=share / share.sum())
    damaged = rng.random(count) < DAMAGED_SHARE
    seeds = rng.integers(0, 2**31, count)
    wrong = rng.choice(DEFECTS[1:], count)
    wrong[rng.random(count) >= misplaced] = ""
    requests = []
    for n, component in enumerate(drawn):
        name = names[component]
        found = str(wrong[n]) if graph.rules[name] in graph.follow else ""
        defect = DAMAGED if damaged[n] else found or None
        image = {"seed": int(seeds[n]), "defect": defect}
        requests.append(CoeRequest(n, n * period_s, name, image))
    return requests


def task_graph(
    name: str,
    seed: int = 0,
    decay: float = DECAY,
    record_bytes: Mapping[str, int] | None = None,
) -> CoeGraph:
    """The board of one of TASKS; arguments as those of `board_graph`."""
    check_known("task", name, TASKS)
    task = TASKS[name]
    return board_graph(task.types, 2 * seed + task.board, decay, record_bytes)


def task_requests(
    name: str, graph: CoeGraph, period_s: float = PERIOD_S, seed: int = 0
) -> list[CoeRequest]:
    """The requests of one of TASKS; those of A1 are the first ones of A2."""
    check_known("task", name, TASKS)
    most = max(one.requests for one in TASKS.values())
    requests = board_requests(graph, most, period_s, 2 * seed + TASKS[name].board)
    return requests[: TASKS[name].requests]


def check_requests(requests: Sequence[CoeRequest], where: str = "requests") -> None:
    """Raises RequestError: none, ids that are not unique, or arrivals that fall."""
    if not requests:
        raise RequestError(f"{where} holds no request; expected at least one")
    seen, before_s = set(), 0.0
    for line, request in enumerate(requests, 1):
        if request.id in seen:
            raise RequestError(f"{where}:{line}: id {request.id!r} occurs twice")
        seen.add(request.id)
        if not before_s <= request.arrival_s < math.inf:
            raise RequestError(
                f"{where}:{line}: arrival_s is {request.arrival_s}, expected "
                f"{before_s} or later: sort the requests by arrival"
            )
        before_s = request.arrival_s


def read_requests(path: str | Path) -> list[CoeRequest]:
    """The requests of a `requests.jsonl`.

    Raises:
      RequestError: a line that is no request (its number is named), or what
        `check_requests` refuses; or the file cannot be read.
    """
    check_there(path, "requests")
    requests = []
    for where, row in json_lines(path, RequestError):
        try:
            request = built(where, CoeRequest, row)
        except ConfigError as error:
            text = str(error) if str(error).startswith(where) else f"{where}: {error}"
            raise RequestError(text) from error
        _check_image(where, request.image)
        requests.append(request)
    check_requests(requests, str(path))
    return requests


def write_requests(path: str | Path, requests: Sequence[CoeRequest]) -> None:
    """Writes what `read_requests` reads."""
    write_text(path, "".join(json.dumps(vars(one)) + "\n" for one in requests))


def _check_image(where: str, image: Any) -> None:
    if isinstance(image, str):
        return
    if set(image) != {"seed", "defect"} or type(image["seed"]) is not int:
        raise RequestError(
            f"{where}: image is {image!r:.60}, expected a path or {{seed, defect}}"
        )
    if image["seed"] < 0:
        raise RequestError(
            f"{where}: seed of the image is {image['seed']}, expected 0 or more"
        )
    if image["defect"] is not None and image["defect"] not in DEFECTS:
        raise RequestError(
            f"{where}: defect is {image['defect']!r}, expected null or one of "
            f"{', '.join(DEFECTS)}"
        )
