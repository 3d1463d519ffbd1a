"""Pictures of most studies: grouped bars and lines, one panel a measure."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.figures import picture

WIDTH, HEIGHT = 6.2, 3.1  # inches of a panel


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
      title: of the panel.
      y_label: with the unit.
      x: names of the groups (bars), or numbers (lines).
      series: values of every label, one for each x; nan where nothing was measured:
        no bar there, and a line joins the points on both sides, which are marked.
      spreads: of error bars, `[2, x]`: below and above.
      x_label: of the x axis.
      level: a dashed line to compare with: (label, value).
      log, log_x: whether the y axis, the x axis is logarithmic.
    """

    title: str
    y_label: str
    x: Sequence
    series: Mapping[str, Sequence[float]]
    spreads: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    x_label: str = ""
    level: tuple[str, float] | None = None
    log: bool = False
    log_x: bool = False


Point = tuple[str, int, float, Sequence[float]]  # label, place on x, value, bounds


def bounded(count: int, points: Iterable[Point]) -> dict[str, dict[str, np.ndarray]]:
    """`series` of a panel with so many places on its x axis, and `spreads` of those
    that have any width."""
    series: dict[str, np.ndarray] = {}
    spreads: dict[str, np.ndarray] = {}
    for label, place, value, (low, high) in points:
        series.setdefault(label, np.full(count, np.nan))[place] = value
        beside = max(value - low, 0), max(high - value, 0)
        spreads.setdefault(label, np.zeros((2, count)))[:, place] = beside
    wide = {label: beside for label, beside in spreads.items() if beside.any()}
    return {"series": series, "spreads": wide}


def draw_panels(
    path: Path,
    panels: Sequence[Panel],
    *,
    title: str,
    columns: int = 2,
    share_y: bool = False,
) -> None:
    """Lines against numbers, or grouped bars where a panel's `x` are names.

    Args:
      path: PNG file to write.
      panels: drawn row by row. A label has one colour in all of them; those that begin
        with `_` are not in the legend.
      title: of the picture.
      columns: panels side by side.
      share_y: whether the panels of a row have one y axis.
    """
    columns = min(columns, len(panels))
    labels = dict.fromkeys(label for panel in panels for label in panel.series)
    numbers = {label: number for number, label in enumerate(labels)}
    shape = {"nrows": -(-len(panels) // columns), "ncols": columns, "squeeze": False}
    size = WIDTH * columns, HEIGHT * shape["nrows"] + 1.0
    if share_y:
        shape["sharey"] = "row"
    with picture(path, title, figsize=size, **shape) as (figure, axes):
        for axis, panel in zip(axes.flat, panels, strict=False):
            draw = _bars if isinstance(panel.x[0], str) else _lines
            draw(axis, panel, numbers)
            if panel.level is not None:
                label, value = panel.level
                style = {"color": "grey", "linestyle": ":", "linewidth": 1.2}
                axis.axhline(value, label=label, **style)
            if panel.log:
                axis.set_yscale("log")
            if panel.log_x:
                axis.set_xscale("log")
            axis.set_title(panel.title, loc="left")
            axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
            axis.grid(axis="y", alpha=0.25)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        known: dict[str, Any] = {}
        for axis in axes.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                known.setdefault(label, handle)
        inches = 0.08 * max(map(len, known)) + 0.8  # of the longest label
        figure.legend(
            known.values(),
            known,
            loc="outside lower center",
            ncols=min(4 * columns, len(known), max(1, int(size[0] / inches))),
            frameon=False,
        )


def _bars(axis, panel: Panel, numbers: Mapping[str, int]) -> None:
    """The groups along x, a bar for each label."""
    width = 0.84 / len(panel.series)
    place_G = np.arange(len(panel.x))
    for place, (label, values) in enumerate(panel.series.items()):
        axis.bar(
            place_G + (place - (len(panel.series) - 1) / 2) * width,
            values,
            width,
            yerr=panel.spreads.get(label),
            error_kw={"linewidth": 0.8},
            label=label,
            color=f"C{numbers[label] % 10}",
        )
    axis.set_xticks(place_G, panel.x)


def _lines(axis, panel: Panel, numbers: Mapping[str, int]) -> None:
    """A line for each label."""
    for label, values in panel.series.items():
        known = ~np.isnan(np.asarray(values, float))
        spreads = panel.spreads.get(label)
        axis.errorbar(
            np.asarray(panel.x)[known],
            np.asarray(values)[known],
            yerr=None if spreads is None else np.asarray(spreads)[..., known],
            label=label,
            color=f"C{numbers[label] % 10}",
            marker="o" if len(panel.x) < 20 or not known.all() else None,
            markersize=3.5,
            linewidth=1.4,
            linestyle="-" if numbers[label] < 10 else "--",
        )
    if few := len(panel.x) < 12:
        axis.set_xticks(panel.x, [str(x) for x in panel.x])
    axis.minorticks_off() if few else axis.minorticks_on()
