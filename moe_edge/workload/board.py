"""Pictures of components on a board, sound or with a defect, drawn from numbers.

A type of component looks as its name says (by a hash of it): body, bands, leads, and a
mark at one end. Each picture has its own light, position, angle and noise, and is the
same whenever and beside whatever it is drawn. Axes: N pictures, H rows, W columns.
"""

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import check_count, check_known
from moe_edge.workload.coe_tasks import DEFECTS

SIZE = 32  # pixels of a side
_NUMBERS = 20  # random numbers behind one picture
_BOARD, _METAL = np.array([0.12, 0.36, 0.18]), np.array([0.75, 0.75, 0.72])


class Look(NamedTuple):
    """What pictures of one type have in common. The picture reaches from -1 to 1.

    Attributes:
      half_x, half_y: of the body; corner: radius of its corners.
      body, board: colours; bands: (place, half width, colour) of stripes.
      leads: on each of two sides, by their height; lead_half: of each.
      mark_is_bar: the mark at the left end is a bar, else a dot; mark: its colour.
    """

    half_x: float
    half_y: float
    corner: float
    body: np.ndarray
    board: np.ndarray
    bands: Sequence[tuple[float, float, np.ndarray]]
    leads: Sequence[float]
    lead_half: float
    mark_is_bar: bool
    mark: np.ndarray


def look_of(component: str) -> Look:
    """The look of a type, by its name."""
    rng = np.random.default_rng(zlib.crc32(component.encode()))
    half_x = rng.uniform(0.6, 0.8)
    half_y = half_x * rng.uniform(0.55, 1.0)
    body = rng.uniform(0.05, 0.95, 3)
    count = int(rng.integers(1, 5))
    bands = [
        (float(place), rng.uniform(0.03, 0.07), rng.uniform(0, 1, 3))
        for place in rng.uniform(-0.25, 0.8, int(rng.integers(0, 4))) * half_x
    ]
    bright = body.mean() > 0.5
    return Look(
        half_x,
        half_y,
        half_y * rng.uniform(0.05, 0.95),
        body,
        _BOARD * rng.uniform(0.7, 1.4, 3),
        bands,
        ((np.arange(count) + 0.5) / count * 2 - 1) * half_y * 0.85,
        half_y * 0.5 / count,
        bool(rng.integers(2)),
        np.full(3, 0.05 if bright else 0.95),
    )


def draw(
    look: Look,
    seeds: Sequence[int],
    defects: Sequence[str | None],
    size: int = SIZE,
) -> np.ndarray:
    """Pictures of one type, float32 [N, H, W, 3] in [0, 1].

    Args:
      seeds: of each picture, 0 or more; defects: of each, one of DEFECTS or None.
    Raises:
      ConfigError: an unknown defect, or no size.
    """
    check_count("size", size)
    for defect in defects:
        if defect is not None:
            check_known("defect", defect, DEFECTS)
    rngs = [np.random.default_rng(seed) for seed in seeds]
    u = np.stack([rng.random(_NUMBERS, np.float32) for rng in rngs])[..., None, None]
    shape = size, size, 3
    noise = np.stack([rng.standard_normal(shape, np.float32) for rng in rngs])
    damaged, moved, turned = (
        np.array([defect == kind for defect in defects])[:, None, None]
        for kind in DEFECTS
    )
    x, y = _camera(u, size)
    soft = 2.0 / size  # edges are as wide as a pixel
    picture = np.empty((len(rngs), *shape), np.float32)
    picture[:] = look.board
    # Pads are the board's: they stay where they are.
    pads = _box(
        np.abs(x) - look.half_x - 0.06, _nearest(y, look), 0.14, look.lead_half + 0.04
    )
    _paint(picture, pads / soft, 0.8 * _METAL)
    # What follows is the component's, which may be moved, turned or damaged.
    angle = 2 * np.pi * u[:, 6]
    distance = np.where(moved, 0.2 + 0.12 * u[:, 7], 0.0)
    x, y = x - distance * np.cos(angle), y - distance * np.sin(angle)
    x, y = np.where(turned, -x, x), np.where(turned, -y, y)
    leads = _box(np.abs(x) - look.half_x, _nearest(y, look), 0.12, look.lead_half)
    _paint(picture, leads / soft, _METAL)
    body = _box(x, y, look.half_x, look.half_y, look.corner)
    _paint(picture, body / soft, look.body)
    for place, half, colour in look.bands:
        band = np.maximum(np.abs(x - place) - half, body)
        _paint(picture, band / soft, colour)
    at = x + 0.68 * look.half_x
    if look.mark_is_bar:
        mark = np.maximum(np.abs(at) - 0.09, body + 0.05)
    else:
        mark = np.hypot(at, y) - 0.14
    _paint(picture, mark / soft, look.mark)
    if damaged.any():
        these = damaged[:, 0, 0]
        part = picture[these]
        _damage(part, look, u[these], (x[these], y[these], body[these]), soft)
        picture[these] = part
    light = 0.85 + 0.3 * u[:, 5, :, :, None]
    return np.clip(picture * light + np.float32(0.025) * noise, 0, 1)


def _camera(u: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Places on the board of every pixel, [N, H, W] each."""
    line = ((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32)
    scale = 1 + 0.08 * (u[:, 2] - 0.5)
    x = (line[None, None, :] - 0.1 * (u[:, 0] - 0.5)) / scale
    y = (line[None, :, None] - 0.1 * (u[:, 1] - 0.5)) / scale
    angle = math.radians(8) * (u[:, 3] - 0.5)
    cos, sin = np.cos(angle), np.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def _nearest(y: np.ndarray, look: Look) -> np.ndarray:
    """Distance of every height to the middle of the nearest lead."""
    return np.min([np.abs(y - float(height)) for height in look.leads], axis=0)


def _box(x, y, half_x, half_y, corner: float = 0.0) -> np.ndarray:
    """Distance to a box with round corners, negative inside."""
    x, y = np.abs(x) - (half_x - corner), np.abs(y) - (half_y - corner)
    outside = np.hypot(np.maximum(x, 0), np.maximum(y, 0))
    return outside + np.minimum(np.maximum(x, y), 0) - corner


def _paint(picture: np.ndarray, pixels: np.ndarray, colour, share=1.0) -> None:
    """Covers what lies within, half of a pixel soft; `pixels` [N, H, W]: distance."""
    cover = (np.clip(0.5 - pixels, 0, 1) * share).astype(np.float32)
    picture += (np.asarray(colour, np.float32) - picture) * cover[..., None]


def _damage(picture, look: Look, u, places, soft: float) -> None:
    """A crack, a broken-off corner or a burnt spot in every picture."""
    x, y, body = places
    kind = (3 * u[:, 8]).astype(int)
    # A crack across the body, at any angle, through a place near its middle.
    angle = np.pi * u[:, 9]
    at = (
        x - 0.5 * look.half_x * (u[:, 10] - 0.5),
        y - 0.5 * look.half_y * (u[:, 11] - 0.5),
    )
    along = np.cos(angle) * at[0] + np.sin(angle) * at[1]
    across = np.cos(angle) * at[1] - np.sin(angle) * at[0]
    jagged = across + 0.05 * np.sin(14 * along + 6 * u[:, 12])
    crack = np.maximum(np.abs(jagged) - (0.06 + 0.03 * u[:, 13]), body)
    dark = np.where(look.body.mean() > 0.25, 0.02, 0.9)
    _paint(picture, crack / soft, dark, kind == 0)
    # A corner of the body that is gone.
    side = np.where(u[:, 14] < 0.5, -1, 1), np.where(u[:, 15] < 0.5, -1, 1)
    radius = (0.6 + 0.25 * u[:, 16]) * look.half_y + 0.45 * look.corner
    corner = x - side[0] * look.half_x, y - side[1] * look.half_y
    chip = np.maximum(np.hypot(*corner) - radius, body)
    alike = np.abs(look.body - look.board).max() < 0.3
    below = np.array([0.85, 0.8, 0.65]) if alike else look.board
    _paint(picture, chip / soft, below, kind == 1)
    # A burnt spot with a soft edge.
    spot = (
        x - look.half_x * (u[:, 17] - 0.5),
        y - look.half_y * (u[:, 18] - 0.5),
    )
    burnt = np.hypot(*spot) - (0.2 + 0.12 * u[:, 19])
    burnt = np.maximum(burnt, body) / (3 * soft)
    _paint(picture, burnt, dark * 0.5, kind == 2)
