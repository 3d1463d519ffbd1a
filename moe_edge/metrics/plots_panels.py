"""Pictures of the offloading studies: grouped bars and lines, one panel a measure."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.core.figures import STYLE, plt

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
      spreads: likewise, half-widths of error bars, or (below, above).
      x_label: of the x axis.
      level: a dashed line to compare with: (label, value).
      log: whether the y axis is logarithmic.
    """

    title: str
    y_label: str
    x: Sequence
    series: Mapping[str, Sequence[float]]
    spreads: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    x_label: str = ""
    level: tuple[str, float] | None = None
    log: bool = False


def bar_panels(
    path: Path, panels: Sequence[Panel], *, title: str, columns: int = 2
) -> None:
    """Grouped bars: the groups along x, a bar for each label.

    Args:
      path: PNG file to write.
      panels: drawn row by row; the first one's labels make the legend.
      title: of the picture.
      columns: panels side by side.
    """

    def draw(axis, panel: Panel) -> None:
        width = 0.84 / len(panel.series)
        place_G = np.arange(len(panel.x))
        for number, (label, values) in enumerate(panel.series.items()):
            shift = (number - (len(panel.series) - 1) / 2) * width
            axis.bar(
                place_G + shift,
                values,
                width,
                yerr=panel.spreads.get(label),
                error_kw={"linewidth": 0.8},
                label=label,
                color=_color(number),
            )
        axis.set_xticks(place_G, panel.x)

    _draw(path, panels, title, columns, draw)


def line_panels(
    path: Path, panels: Sequence[Panel], *, title: str, columns: int = 2
) -> None:
    """Lines against numbers; arguments as of `bar_panels`."""

    def draw(axis, panel: Panel) -> None:
        for number, (label, values) in enumerate(panel.series.items()):
            known = ~np.isnan(np.asarray(values, float))
            spreads = panel.spreads.get(label)
            axis.errorbar(
                np.asarray(panel.x)[known],
                np.asarray(values)[known],
                yerr=None if spreads is None else np.asarray(spreads)[..., known],
                label=label,
                color=_color(number),
                marker="o" if len(panel.x) < 20 or not known.all() else None,
                markersize=3.5,
                linewidth=1.4,
                linestyle="-" if number < 10 else "--",
            )
        if few := len(panel.x) < 12:
            axis.set_xticks(panel.x, [str(x) for x in panel.x])
        axis.minorticks_off() if few else axis.minorticks_on()

    _draw(path, panels, title, columns, draw)


def _color(number: int):
    return plt.get_cmap("tab10")(number % 10)


def _draw(path, panels, title, columns, draw) -> None:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=(WIDTH * columns, HEIGHT * rows + 1.0),
            squeeze=False,
            layout="constrained",
        )
        for axis, panel in zip(axes.flat, panels, strict=False):
            draw(axis, panel)
            if panel.level is not None:
                label, value = panel.level
                axis.axhline(
                    value, color="grey", linestyle=":", linewidth=1.2, label=label
                )
            if panel.log:
                axis.set_yscale("log")
            axis.set_title(panel.title, loc="left")
            axis.set_ylabel(panel.y_label)
            axis.set_xlabel(panel.x_label)
            axis.grid(axis="y", alpha=0.25)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(4 * columns, len(labels)),
            frameon=False,
        )
        figure.suptitle(title)
        figure.savefig(path)
        plt.close(figure)
