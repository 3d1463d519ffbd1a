"""Pictures of results: expert usage, bars of a benchmark, what a run did in time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.events import Event
from moe_edge.core.figures import picture

# Top of the usage colour scale, in uniform shares: with 8 of 64 experts a token, an
# expert that every token chooses has 8.
MAX_RELATIVE = 8.0
# lane -> (kind, cause, colour)
LANES = {
    "compute": ("compute", None, "#4c72b0"),
    "waiting for experts": ("wait", None, "#c44e52"),
    "transfer, on demand": ("transfer", "demand", "#dd8452"),
    "transfer, prefetch": ("transfer", "prefetch", "#55a868"),
}


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
    from matplotlib.colors import TwoSlopeNorm

    N, L, E = counts_NLE.shape
    layers = range(L) if layers is None else layers
    totals_NL1 = np.maximum(counts_NLE.sum(axis=-1, keepdims=True), 1)
    relative_NLE = counts_NLE / totals_NL1 * E
    columns = 2 if L > 1 else 1
    rows = -(-L // columns)
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=MAX_RELATIVE)
    size = 6.0 * columns + 0.9, (0.24 * N + 0.62) * rows + 1.1
    shape = {"nrows": rows, "ncols": columns, "squeeze": False}
    with picture(path, title, figsize=size, **shape) as (figure, axes):
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
    with picture(path, figsize=(8.0, 0.42 * len(rows) + 1.4)) as (_, axis):
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


def window_of(events: Sequence[Event], steps: int) -> tuple[float, float]:
    """Seconds of the last `steps` steps but one; of everything if there are fewer."""
    starts: dict[int, float] = {}
    for event in events:
        if event.kind == "compute":
            starts.setdefault(event.step, event.t_s)
    edges = sorted(starts.values())
    if len(edges) > steps:
        return edges[-steps - 1], edges[-1]
    ends = [event.t_s + event.dur_s for event in events]
    return (min(edges, default=0.0), max(ends, default=1.0))


def timeline(
    path: Path, events: Sequence[Event], *, title: str, steps: int = 3
) -> None:
    """Bars of compute, waits and transfers during a few decode steps.

    Args:
      path: PNG file to write.
      events: of a run (`core.events.Recorder.events`).
      title: of the picture.
      steps: how many of the last steps are shown.
    """
    first_s, last_s = window_of(events, steps)
    with picture(path, figsize=(9, 2.6)) as (_, axes):
        for row, (kind, cause, colour) in enumerate(LANES.values()):
            bars = [
                (1e3 * (event.t_s - first_s), 1e3 * event.dur_s)
                for event in events
                if event.kind == kind
                and (cause is None or event.cause == cause)
                and first_s <= event.t_s < last_s
            ]
            axes.broken_barh(
                bars, (row - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3
            )
        axes.set_yticks(range(len(LANES)), list(LANES))
        axes.invert_yaxis()
        axes.set_xlim(0, 1e3 * (last_s - first_s))
        axes.set_xlabel(f"milliseconds ({steps} tokens)")
        axes.set_title(title)
