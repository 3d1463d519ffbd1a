"""The images of a run's requests, drawn or read before it begins.

Whatever is wrong with an image fails its own request: no error of one leaves here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.papers.coserve.workload.board import draw
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest


def request_images(
    graph: CoeGraph, requests: Sequence[CoeRequest], folder: Path
) -> list[np.ndarray | str]:
    """Of each request, float32 [H, W, 3]; or why there is none, in one line; nothing
    of a component without a rule, whose requests fail for that.

    Args:
      folder: to which paths of images are relative.
    """
    found: list[np.ndarray | str] = [""] * len(requests)
    drawn: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        if request.component not in graph.rules:
            continue
        if isinstance(request.image, str):
            found[number] = _read(graph, request, folder)
        else:
            drawn.setdefault(request.component, []).append(number)
    for component, numbers in drawn.items():
        images = _drawn(component, [requests[n].image for n in numbers])
        for number, image in zip(numbers, images, strict=True):
            whole = isinstance(image, np.ndarray)
            wrong = _wrong(graph, requests[number], image) if whole else None
            found[number] = wrong or image
    return found


def _drawn(
    component: str, images: Sequence[Mapping[str, Any]]
) -> list[np.ndarray | str]:
    """All at once; where that fails one by one, to know whose fault it is."""
    try:
        return list(draw(component, images))
    except Exception as error:
        if len(images) == 1:
            return [f"image {dict(images[0])} cannot be drawn: {_line(error)}"]
        return [_drawn(component, [one])[0] for one in images]


def _read(graph: CoeGraph, request: CoeRequest, folder: Path) -> np.ndarray | str:
    """Of a file: its header alone says whether there is more to read."""
    try:
        view = np.lib.format.open_memmap(folder / request.image, mode="r")
        if view.dtype != np.float32:
            return f"image {_name(request)} holds {view.dtype}, expected float32"
        return _wrong(graph, request, view) or np.array(view)
    except Exception as error:  # NumPy raises many kinds for a header
        return f"image {_name(request)} cannot be read: {_line(error)}"


def _wrong(graph: CoeGraph, request: CoeRequest, image: np.ndarray) -> str | None:
    """Why some expert of its chain cannot judge an image."""
    name, expert = _name(request), graph.rules[request.component]
    while expert is not None:
        shape = graph.architectures[graph.experts[expert].architecture].input_shape
        if image.shape != tuple(shape):
            return f"image {name} has shape {image.shape}, expected {tuple(shape)}"
        expert = graph.follow.get(expert)
    if not np.isfinite(image).all():
        return f"image {name} holds NaN or infinity, expected numbers"
    return None


def _name(request: CoeRequest) -> str:
    if not isinstance(request.image, str):
        return "as drawn"
    return repr(Path(request.image).name)[1:-1]  # in one line, whatever it holds


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
