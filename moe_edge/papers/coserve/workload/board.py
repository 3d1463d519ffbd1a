"""Draws what the requests of a board show: components, sound or with a defect.

A crop of 32 x 32 pixels shows a component on its footprint; it takes 64 to 78 % of the
width. Types come in six packages and eight variants of each: a line of print, a spot
and a groove may be there or not. A component of the wrong variant counts as damaged, so
only who knows the type, which an image does not tell, can judge all images. A type's
look follows from its name alone, an image from name, seed and defect.
The footprint (pads, outline, a dot where the marked end belongs) stays in place, the
component on it moves a little in every image, and far if it is `misaligned`.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_edge.papers.coserve.workload.coe_tasks import DAMAGED

SIZE = 32
SHAPE = (SIZE, SIZE, 3)
_DRAWN = 20  # uniform numbers of an image
_NOISE = 0.03
_KINDS = (0.25, 0.5, 0.7)  # of damage, as shares of 1: crack, piece, burn; else variant
_Y, _X = (np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2).astype(np.float32)


class Package(NamedTuple):
    """What many types share, as on real boards.

    Attributes:
      width: of the crop; height: of the width; body: colour.
      pins, upright, round_mark: as of a `Look`.
    """

    width: float
    height: float
    body: tuple[float, float, float]
    pins: int
    upright: bool
    round_mark: bool


_PACKAGES = (
    Package(0.77, 0.80, (0.12, 0.12, 0.13), 4, False, True),
    Package(0.73, 0.65, (0.14, 0.13, 0.12), 3, False, False),
    Package(0.69, 0.80, (0.66, 0.56, 0.42), 1, True, False),
    Package(0.77, 0.60, (0.74, 0.74, 0.72), 2, True, True),
    Package(0.71, 0.75, (0.20, 0.30, 0.60), 5, False, True),
    Package(0.65, 0.85, (0.13, 0.14, 0.15), 2, True, False),
)


class Look(NamedTuple):
    """Of a type. Lengths in pixels from the middle, colours red, green, blue 0..1.

    Attributes:
      half: width and height of the body, halved; round: radius of its corners.
      pins: on each of two sides; upright: the sides are the left and right ones.
      round_mark: at the marked end, else a bar.
      board, body, print, mark: colours.
      lines: of print: how high each lies; the last one is part of the variant.
      spot, groove: x, y and size of what looks like a burn or a crack.
      variant: whether a sound one has the last line, the spot, the groove.
    """

    half: tuple[float, float]
    round: float
    pins: int
    upright: bool
    round_mark: bool
    board: np.ndarray
    body: np.ndarray
    print: np.ndarray
    mark: np.ndarray
    lines: tuple[float, ...]
    spot: tuple[float, float, float]
    groove: tuple[float, float, float]
    variant: np.ndarray


@functools.lru_cache(maxsize=1024)
def look(component: str) -> Look:
    """Of the type of that name."""
    digest = hashlib.sha256(component.encode()).digest()
    number = digest[0] % len(_PACKAGES)
    package, rng = _PACKAGES[number], np.random.default_rng([number, 1])
    width = SIZE / 2 * package.width
    height = width * package.height
    body = np.array(package.body)
    away = np.where(body.mean() > 0.45, -0.3, 0.3)  # dark print on what is bright
    slots = height * np.array([-0.5, 0.0, 0.5])[: rng.integers(1, 4)]
    x, y = width * rng.uniform(-0.4, 0.5, 2), height * rng.uniform(-0.5, 0.5, 2)
    return Look(
        (width, height),
        rng.uniform(0.5, 1.5),
        package.pins,
        package.upright,
        package.round_mark,
        np.array([0.05, 0.35, 0.15]),
        body,
        np.clip(body + away + rng.uniform(-0.1, 0.1, 3), 0, 1),
        np.clip(body + 1.6 * away, 0, 1),
        tuple(slots.tolist()),
        (x[0], y[0], rng.uniform(1.5, 3.0)),
        (x[1], y[1], rng.uniform(3.0, 6.0)),
        np.array([bool(digest[1] >> bit & 1) for bit in range(3)]),
    )


def draw(component: str, images: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Images of one component.

    Args:
      images: {seed, defect} of each, as in `CoeRequest.image`.
    Returns:
      float32 [N, 32, 32, 3], 0..1.
    """
    n, one = len(images), look(component)
    u_NU = np.empty((n, _DRAWN), np.float32)
    noise_NHWC = np.empty((n, *SHAPE), np.float32)
    for row, image in enumerate(images):
        rng = np.random.default_rng(image["seed"])
        rng.random(dtype=np.float32, out=u_NU[row])
        rng.standard_normal(dtype=np.float32, out=noise_NHWC[row])
    defects = _defects(images)
    canvas = _footprint(one, n)
    x, y = _frame(*_pose(u_NU.T, defects))
    body = _cover(_box(x, y, *one.half, one.round))
    _paint(canvas, _pins(one, x, y), np.array([0.75, 0.75, 0.78]))
    _paint(canvas, body, one.body)
    hurt = defects == DAMAGED
    wrong = hurt & (u_NU[:, 6] >= _KINDS[2])
    which = np.arange(3)[None] == (3 * u_NU[:, 15, None]).astype(int)
    _marks(canvas, one, body, x, y, one.variant[None] ^ (wrong[:, None] & which))
    if hurt.any():
        part = canvas[:, hurt]
        _damage(part, one, u_NU[hurt].T, body[hurt], x[hurt], y[hurt])
        canvas[:, hurt] = part
    u = u_NU.T[:, :, None, None]
    light = 0.85 + 0.3 * u[17] + 0.006 * ((u[18] - 0.5) * _X + (u[19] - 0.5) * _Y)
    canvas *= light
    lit_NHWC = np.moveaxis(canvas, 0, -1) + np.float32(_NOISE) * noise_NHWC
    return np.clip(lit_NHWC, 0, 1, dtype=np.float32)


def poses(images: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """How components lie in images, whatever their type.

    Returns:
      float32 [N, 3]: shift in x and y from where they belong, in pixels; turn, radians.
    """
    u_NU = np.empty((len(images), _DRAWN), np.float32)
    for row, image in enumerate(images):
        np.random.default_rng(image["seed"]).random(dtype=np.float32, out=u_NU[row])
    return np.stack(_pose(u_NU.T, _defects(images)), axis=1, dtype=np.float32)


def _defects(images: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([image["defect"] or "" for image in images])


def _pose(u: np.ndarray, defects: np.ndarray) -> tuple[np.ndarray, ...]:
    """Shift in x, in y, and turn, [N] each."""
    shift_x, shift_y = 1.6 * (u[0] - 0.5), 1.6 * (u[1] - 0.5)
    angle = np.deg2rad(6 * (u[2] - 0.5))
    moved, turned = defects == "misaligned", u[3] < 0.3
    far, way = np.where(moved & ~turned, 3 + 2 * u[4], 0), 2 * np.pi * u[5]
    shift_x, shift_y = shift_x + far * np.cos(way), shift_y + far * np.sin(way)
    turn = np.deg2rad(14 + 10 * u[4]) * np.where(u[5] < 0.5, -1, 1)
    angle = angle + np.where(moved & turned, turn, 0)
    angle = angle + np.where(defects == "wrong_polarity", np.pi, 0)
    return shift_x, shift_y, angle


def _frame(shift_x: np.ndarray, shift_y: np.ndarray, angle: np.ndarray):
    """float32 [N, H, W] twice: each pixel in the component's own frame."""
    x = _X - shift_x[:, None, None]
    y = _Y - shift_y[:, None, None]
    cos, sin = (f(angle)[:, None, None] for f in (np.cos, np.sin))
    return np.float32(x * cos + y * sin), np.float32(y * cos - x * sin)


def _footprint(one: Look, n: int) -> np.ndarray:
    """The board below: float32 [3, N, H, W]."""
    colour = np.float32(one.board)[:, None, None, None]
    canvas = np.broadcast_to(colour, (3, 1, SIZE, SIZE)).copy()
    x, y = _X[None], _Y[None]
    _paint(canvas, _pins(one, x, y, 0.8), np.array([0.8, 0.65, 0.3]))
    width, height = one.half
    outline = np.abs(_box(x, y, width + 1.3, height + 1.3, one.round))
    white = np.array([0.9, 0.9, 0.9])
    _paint(canvas, 0.7 * _cover(outline - 0.4), white)
    corner = np.hypot(x + width + 1.5, y + height + 1.5)
    _paint(canvas, _cover(corner - 1.3), white)
    return np.repeat(canvas, n, axis=1)


def _pins(one: Look, x: np.ndarray, y: np.ndarray, more: float = 0.0) -> np.ndarray:
    """What the pins of both sides cover; `more` wide all round."""
    across, along = (x, y) if one.upright else (y, x)
    width, height = one.half if one.upright else one.half[::-1]
    pitch = 2 * height / one.pins
    near = np.abs((along + height) % pitch - pitch / 2)
    inside = np.abs(along) - height
    reach = np.abs(np.abs(across) - width) - 1.6 - more
    return _cover(np.maximum(np.maximum(near - 0.27 * pitch - more, reach), inside))


def _crack_colour(one: Look) -> np.ndarray:
    return np.full(3, 0.0 if one.body.mean() > 0.3 else 1.0)


def _burnt_colour(one: Look) -> np.ndarray:
    """Soot on what is bright, ash on what is dark."""
    dark = one.body.mean() < 0.3
    return np.array([0.7, 0.65, 0.6]) if dark else np.array([0.1, 0.06, 0.03])


def _broken_colour(one: Look) -> np.ndarray:
    """Of what is inside of a body."""
    dark = one.body.mean() < 0.3
    return np.array([0.75, 0.6, 0.45]) if dark else np.array([0.3, 0.22, 0.18])


def _marks(canvas, one: Look, body, x, y, has_N3: np.ndarray) -> None:
    """Print, spot and groove, and the mark at the left end.

    Args:
      has_N3: bool, variant of each image.
    """
    width, _ = one.half
    last, spot, groove = (body * has[:, None, None] for has in has_N3.T)
    for line in one.lines:
        cover = np.maximum(np.abs(y - line) - 0.5, np.abs(x - 2) - 0.5 * width)
        printed = last if line == one.lines[-1] else body
        _paint(canvas, printed * _cover(cover), one.print)
    if one.round_mark:
        mark = np.hypot(x + 0.72 * width, y) - 2.0
    else:
        mark = np.abs(x + 0.75 * width) - 1.2
    _paint(canvas, body * _cover(mark), one.mark)
    mid_x, mid_y, size = one.spot
    cover = _cover((np.hypot(x - mid_x, y - mid_y) - size) / 2)
    _paint(canvas, 0.75 * spot * cover, _burnt_colour(one))
    mid_x, mid_y, size = one.groove
    line = np.abs(x - mid_x + 0.6 * (y - mid_y)) - 0.4
    cover = _cover(np.maximum(line, np.abs(y - mid_y) - size))
    _paint(canvas, 0.8 * groove * cover, _crack_colour(one))


def _damage(canvas, one: Look, u, body, x, y) -> None:
    """A crack, a missing piece of the rim, or a burn."""
    u = u[:, :, None, None]
    width, height = one.half
    kind, way = u[6], 2 * np.pi * u[7]
    mid_x, mid_y = width * (u[8] - 0.5), height * (u[9] - 0.5)
    along = (x - mid_x) * np.cos(way) + (y - mid_y) * np.sin(way)
    bend = 1.2 * np.sin(1.3 * along + 6 * u[10])
    crack = np.abs((y - mid_y) * np.cos(way) - (x - mid_x) * np.sin(way) + bend)
    crack = np.maximum(crack - 0.4 - 0.4 * u[11], np.abs(along) - 4 - 6 * u[12])
    crack = (0.7 + 0.3 * u[13]) * _cover(crack)
    rim_x, rim_y = width * np.cos(way), height * np.sin(way)
    piece = _cover(np.hypot(x - rim_x, y - rim_y) - 2.2 - 2.5 * u[12])
    burn = _cover((np.hypot(x - mid_x, y - mid_y) - 2 - 2.5 * u[13]) / 2)
    burn = (0.6 + 0.3 * u[14]) * burn
    cracked, broken, burnt = _KINDS
    _paint(canvas, body * crack * (kind < cracked), _crack_colour(one))
    piece = body * piece * ((kind >= cracked) & (kind < broken))
    _paint(canvas, piece, _broken_colour(one))
    burn = body * burn * ((kind >= broken) & (kind < burnt))
    _paint(canvas, burn, _burnt_colour(one))


def _box(x, y, width: float, height: float, radius: float) -> np.ndarray:
    """Distance to the rim of a box with round corners; negative inside."""
    out_x, out_y = np.abs(x) - (width - radius), np.abs(y) - (height - radius)
    outside = np.hypot(np.maximum(out_x, 0), np.maximum(out_y, 0))
    return outside + np.minimum(np.maximum(out_x, out_y), 0) - np.float32(radius)


def _cover(distance: np.ndarray) -> np.ndarray:
    """Share of each pixel that a shape covers, by the distance to its rim."""
    return np.clip(0.5 - distance, 0, 1)


def _paint(canvas: np.ndarray, cover: np.ndarray, colour: np.ndarray) -> None:
    """Lays a colour over [3, N, H, W] as far as [N, H, W] says, in place.

    Colours are planes: NumPy is three times as fast with long rows as with short ones.
    """
    cover = cover.astype(np.float32)
    for plane, value in zip(canvas, np.float32(colour), strict=True):
        plane += cover * (value - plane)
