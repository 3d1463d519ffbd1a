"""A picture of what computed and what travelled, from the events of a run."""

from collections.abc import Sequence
from pathlib import Path

from moe_edge.core.events import Event
from moe_edge.core.figures import STYLE, plt

# lane -> (kind, cause, colour)
LANES = {
    "compute": ("compute", None, "#4c72b0"),
    "waiting for experts": ("wait", None, "#c44e52"),
    "transfer, on demand": ("transfer", "demand", "#dd8452"),
    "transfer, prefetch": ("transfer", "prefetch", "#55a868"),
}


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
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
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
        figure.savefig(path)
        plt.close(figure)
