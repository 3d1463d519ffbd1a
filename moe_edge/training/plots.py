"""Pictures of a training run: its loss, and how evenly experts are used."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.figures import STYLE, plt


@contextlib.contextmanager
def _picture(path: Path, title: str, x: str, y: str, columns: int = 1) -> Iterator[Any]:
    """Yields the axis of a picture that is written at the end; axes are named x, y."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7.0, 4.0), layout="constrained")
        yield axis
        axis.set(xlabel=x, ylabel=y)
        axis.set_title(title, loc="left")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, ncols=columns)
        figure.savefig(path)
        plt.close(figure)


def loss_curve(path: Path, rows: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Training and held-out loss against tokens seen, as a PNG file.

    Args:
      rows: metric rows with `tokens`; one without `loss` or `held_out_loss` is left
        out of that curve.
    """
    series = {"loss": "training", "held_out_loss": "held out (mean)"}
    x, y = "tokens seen (millions)", "loss (nats per token)"
    with _picture(path, title, x, y) as axis:
        for key, label in series.items():
            points = [(row["tokens"] / 1e6, row[key]) for row in rows if key in row]
            if not points:
                continue
            few = len(points) < 60
            axis.plot(
                *np.asarray(points, float).T,
                label=label,
                marker="o" if few else None,
                markersize=3.5,
                linewidth=1.6 if few else 0.9,
                alpha=1.0 if few else 0.8,
            )


def routing_entropy(
    path: Path, entropy_NL: np.ndarray, tasks: Sequence[str], *, num_experts: int
) -> None:
    """Entropy of expert usage of every task against the layer, with the maximum.

    Args:
      path: PNG file to write.
      entropy_NL: bits.
      tasks: names, one a curve.
      num_experts: its log2 is the entropy of uniform usage.
    """
    layers, top = range(entropy_NL.shape[1]), np.log2(num_experts)
    title = "Routing entropy by layer and task"
    with _picture(path, title, "layer", "entropy of expert usage (bits)", 2) as axis:
        for task, entropy_L in zip(tasks, entropy_NL, strict=True):
            axis.plot(layers, entropy_L, marker="o", markersize=4, label=task)
        axis.axhline(top, color="grey", linestyle="--", linewidth=1)
        axis.annotate("uniform", (0, top), (2, 3), textcoords="offset points")
        axis.set_xticks(layers)
