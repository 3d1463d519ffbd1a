"""The images of a run's requests, drawn or read before it begins."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.workload.board import draw
from moe_edge.workload.coe_graph import CoeGraph
from moe_edge.workload.coe_tasks import CoeRequest


def request_images(
    graph: CoeGraph, requests: Sequence[CoeRequest], folder: Path
) -> list[np.ndarray | str]:
    """Of each request, float32 [H, W, 3]; or why there is none, in one line.

    Args:
      folder: to which paths of images are relative.
    """
    found: list[np.ndarray | str] = [""] * len(requests)
    drawn: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        if isinstance(request.image, str):
            found[number] = _read(folder / request.image)
        else:
            drawn.setdefault(request.component, []).append(number)
    for component, numbers in drawn.items():
        images = draw(component, [requests[n].image for n in numbers])
        for number, image in zip(numbers, images, strict=True):
            found[number] = image
    for number, request in enumerate(requests):
        if isinstance(found[number], np.ndarray):
            found[number] = _checked(graph, request, found[number])
    return found


def _read(path: Path) -> np.ndarray | str:
    """A view of the file: its header alone says whether there is more to read."""
    try:
        image = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        return f"image {path.name} cannot be read: {str(error).splitlines()[0]}"
    if image.dtype != np.float32:
        return f"image {path.name} holds {image.dtype}, expected float32"
    return image


def _checked(
    graph: CoeGraph, request: CoeRequest, image: np.ndarray
) -> np.ndarray | str:
    """The image if every expert of its chain can judge it, else why not."""
    name = request.image if isinstance(request.image, str) else "as drawn"
    expert = graph.rules.get(request.component)
    while expert is not None:
        shape = graph.architectures[graph.experts[expert].architecture].input_shape
        if image.shape != tuple(shape):
            return f"image {name} has shape {image.shape}, expected {tuple(shape)}"
        expert = graph.follow.get(expert)
    if not np.isfinite(image).all():
        return f"image {name} holds NaN or infinity, expected numbers"
    return np.array(image)
