"""Picture of fidelity: agreement and perplexity over a."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.figures import STYLE, plt

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")
LINES = ("-", "--", ":", "-.")
Rows = Sequence[Mapping[str, Any]]


def _rule(row: Mapping[str, Any]) -> str:
    rule = row.get("weights", "drop")
    return rule + (" renormalised" if row["renormalise"] else "")


def _control(axis, value: float, label: str) -> None:
    axis.axhline(value, color="grey", linewidth=1, linestyle=(0, (1, 2)))
    axis.annotate(
        label, (1, value), (-2, 2), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", color="grey", fontsize=7,
    )  # fmt: skip


def fidelity_curves(path: Path, cards: Rows, *, title: str) -> None:
    """Agreement and perplexity ratio over a (or threshold), one column a budget.

    Args:
      path: PNG file to write.
      cards: of `card.py`.
      title: of the picture.
    """
    lossy = [card for card in cards if not card["control"]]
    half = [c for c in cards if c["control"] and c["option"] != "topk"]
    budgets = list(dict.fromkeys(card["device_memory"] for card in lossy))
    batches = list(dict.fromkeys(card["batch"] for card in lossy))
    kinds = {"substitute": ("a", "a"), "drop": ("threshold", "threshold of dropping")}
    kinds = {k: v for k, v in kinds.items() if any(c["option"] == k for c in lossy)}
    values = (
        ("perplexity_ratio", "ratio_interval95", "perplexity ratio"),
        ("agreement", "agreement_interval95", "agreement"),
    )
    shape = (len(values) * len(kinds), len(budgets))
    with plt.rc_context(STYLE):
        figure, axes_RC = plt.subplots(
            *shape,
            figsize=(3.4 * shape[1] + 1, 2.3 * shape[0] + 0.8),
            squeeze=False,
            sharey="row",
            layout="constrained",
        )
        for row, (kind, value) in enumerate((k, v) for k in kinds for v in values):
            (key, interval, label), (x, x_label) = value, kinds[kind]
            for column, budget in enumerate(budgets):
                axis = axes_RC[row, column]
                here = [c for c in lossy if c["device_memory"] == budget]
                here = [c for c in here if c["option"] == kind]
                rules = list(dict.fromkeys(map(_rule, here)))
                for batch, line in zip(batches, LINES, strict=False):
                    for rule, colour in zip(rules, COLOURS, strict=False):
                        mine = [c for c in here if _rule(c) == rule]
                        mine = [c for c in mine if c["batch"] == batch]
                        mine.sort(key=lambda c: c[x])
                        x_N = np.asarray([c[x] for c in mine], float)
                        low, high = np.asarray([c[interval] for c in mine]).T
                        if batch == batches[0]:  # more bands hide the lines
                            band = {"color": colour, "alpha": 0.1, "lw": 0}
                            axis.fill_between(x_N, low, high, **band)
                        axis.plot(
                            x_N,
                            [c[key] for c in mine],
                            line,
                            color=colour,
                            marker="o",
                            markersize=3,
                            label=f"{rule}, batch {batch}",
                        )
                for control in half[:1]:
                    _control(axis, control[key], control["option"])
                axis.grid(alpha=0.25)
                axis.set_xlabel(x_label)
                if row == 0:
                    axis.set_title(f"{budget} of the experts' bytes", loc="left")
            axes_RC[row, 0].set_ylabel(label)
            axes_RC[row, 0].legend(frameon=False, fontsize=6)
        figure.suptitle(title, fontsize=11)
        figure.savefig(path)
        plt.close(figure)
