"""Pictures of a training run: its loss, and how evenly experts are used."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.figures import picture


def loss_curve(path: Path, rows: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Training and held-out loss against tokens seen.

    Args:
      path: PNG file to write.
      rows: metric rows with `tokens`; one without `loss` or `held_out_loss` is left
        out of that curve.
      title: of the picture.
    """
    series = {"loss": "training", "held_out_loss": "held out (mean)"}
    with picture(path, figsize=(7.0, 4.0)) as (_, axis):
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
        axis.set_xlabel("tokens seen (millions)")
        axis.set_ylabel("loss (nats per token)")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
        axis.set_title(title, loc="left")


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
    N, L = entropy_NL.shape
    with picture(path, figsize=(7.0, 4.0)) as (_, axis):
        for row, task in enumerate(tasks):
            axis.plot(range(L), entropy_NL[row], marker="o", markersize=4, label=task)
        top = np.log2(num_experts)
        axis.axhline(top, color="grey", linestyle="--", linewidth=1)
        axis.annotate("uniform", (0, top), (2, 3), textcoords="offset points")
        axis.set_xticks(range(L))
        axis.set_xlabel("layer")
        axis.set_ylabel("entropy of expert usage (bits)")
        axis.set_title("Routing entropy by layer and task", loc="left")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, ncols=2)
