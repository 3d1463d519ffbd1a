"""Pictures of results: expert usage by task, and bars of a benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm

from moe_edge.core.figures import STYLE, plt

# Top of the usage colour scale, in uniform shares: with 8 of 64 experts a token, an
# expert that every token chooses has 8.
MAX_RELATIVE = 8.0


def order_by_task(shares_NE: np.ndarray) -> np.ndarray:
    """Experts grouped by the task that uses them most, favourites first."""
    favourite_E = shares_NE.argmax(axis=0)
    return np.lexsort((-shares_NE.max(axis=0), favourite_E))


def expert_usage(
    path: Path,
    counts_NLE: np.ndarray,
    tasks: Sequence[str],
    *,
    title: str,
    layers: Sequence[int] | None = None,
    notes: Sequence[str] | None = None,
) -> None:
    """One panel a layer: tasks x experts, coloured by share of the choices.

    Args:
      path: PNG file to write.
      counts_NLE: how often each task chose each expert.
      tasks: names, one a row.
      title: of the picture.
      layers: ids of the layers (default 0, 1, ...).
      notes: a few words for each panel's title.
    """
    N, L, E = counts_NLE.shape
    layers = range(L) if layers is None else layers
    totals_NL1 = np.maximum(counts_NLE.sum(axis=-1, keepdims=True), 1)
    relative_NLE = counts_NLE / totals_NL1 * E
    columns = 2 if L > 1 else 1
    rows = -(-L // columns)
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=MAX_RELATIVE)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=(6.0 * columns + 0.9, (0.24 * N + 0.62) * rows + 1.1),
            squeeze=False,
            layout="constrained",
        )
        for panel, axis in enumerate(axes.flat):
            if panel >= L:
                axis.set_visible(False)
                continue
            order = order_by_task(relative_NLE[:, panel])
            image = axis.imshow(
                relative_NLE[:, panel][:, order],
                aspect="auto",
                cmap="RdBu_r",
                norm=norm,
                interpolation="nearest",
            )
            note = f"   {notes[panel]}" if notes else ""
            axis.set_title(f"layer {layers[panel]}{note}", loc="left")
            # Every second panel shares the names of its left neighbour.
            names = tasks if panel % columns == 0 else [""] * N
            axis.set_yticks(range(N), names)
            axis.set_yticks(np.arange(N + 1) - 0.5, minor=True)
            axis.grid(which="minor", axis="y", color="white", linewidth=1.5)
            axis.tick_params(length=0, which="both")
            axis.set_xticks([])
            axis.spines[:].set_visible(False)
            if panel >= L - columns:
                axis.set_xlabel(f"{E} experts, grouped by the task that uses them most")
        bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=30, extend="max")
        bar.set_label("share of choices, in units of the uniform share")
        bar.set_ticks([0, 0.5, 1, 2, 4, 6, 8])
        figure.suptitle(title)
        figure.savefig(path)
        plt.close(figure)


def benchmark_bars(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Ours over the peer of every case, with every round as a dot.

    Args:
      path: PNG file to write.
      rows: of a benchmark: `case`, `ratio` (None without a peer), `runs`.
      title: of the picture.
    """
    compared = [row for row in rows if row["ratio"] is not None]
    rows, key = (compared, "ratio") if compared else (list(rows), "ours")
    label = "ours / peer in the same round (dashed: equal; dots: rounds)"
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(
            figsize=(8.0, 0.42 * len(rows) + 1.4), layout="constrained"
        )
        for place, row in enumerate(rows):
            ratio = row[key]
            axis.barh(place, ratio, color="#4c78a8", height=0.6)
            axis.annotate(
                f"{ratio:.2f}", (ratio, place), (4, 0), textcoords="offset points",
                va="center",
            )  # fmt: skip
            dots = row.get("round_ratios", ())
            axis.plot(dots, [place] * len(dots), ".", color="black", markersize=4)
        if compared:
            axis.axvline(1.0, color="black", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(rows)), [row["case"] for row in rows])
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_xlabel(label if compared else f"ours, {rows[0]['unit']}")
        axis.set_title(title)
        figure.savefig(path)
        plt.close(figure)
