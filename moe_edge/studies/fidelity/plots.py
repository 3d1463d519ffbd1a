"""Pictures of fidelity: agreement, perplexity and time per token over a."""

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


def _finish(figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
    plt.close(figure)


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
      cards: of `run_fidelity`.
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
        _finish(figure, path, title)


def accuracy_over_a(path: Path, tasks: Rows, fidelity: Rows, *, title: str) -> None:
    """Accuracy of each task with its interval and chance; fidelity beside it.

    Args:
      path: PNG file to write.
      tasks: rows with task, a, accuracy, interval95, chance.
      fidelity: rows with a, agreement, perplexity_ratio and their intervals.
      title: of the picture.
    """
    names = list(dict.fromkeys(row["task"] for row in tasks))
    columns = min(4, len(names) + 2)
    lines = -(-(len(names) + 2) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            lines,
            columns,
            figsize=(2.7 * columns + 0.6, 2.2 * lines + 0.8),
            squeeze=False,
            layout="constrained",
        )
        panels = [
            (name, [r for r in tasks if r["task"] == name], "accuracy", "interval95")
            for name in names
        ]
        panels += [
            ("text: agreement", fidelity, "agreement", "agreement_interval95"),
            (
                "text: perplexity ratio",
                fidelity,
                "perplexity_ratio",
                "ratio_interval95",
            ),
        ]
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (name, rows, key, interval) in zip(axes.flat, panels, strict=False):
            x_N = [row["a"] for row in rows]
            low, high = np.asarray([row[interval] for row in rows]).T
            colour = COLOURS[0] if key == "accuracy" else COLOURS[1]
            axis.fill_between(x_N, low, high, color=colour, alpha=0.2, lw=0)
            axis.plot(x_N, [row[key] for row in rows], "o-", color=colour, markersize=3)
            if key == "accuracy":
                _control(axis, rows[0]["chance"], "chance")
            axis.set_title(name, loc="left")
            axis.set_xlabel("a")
            axis.grid(alpha=0.25)
        _finish(figure, path, title)


def tpot_over_a(path: Path, points: Rows, fits: Rows, *, title: str) -> None:
    """Measured time per token over a with its fit, and agreement below.

    Args:
      path: PNG file to write.
      points: rows with batch, a, tpot_s (of each repetition), agreement.
      fits: per batch `coefficients` (constant first), `a`, `budget_tpot_s`.
      title: of the picture.
    """
    with plt.rc_context(STYLE):
        figure, axes_2C = plt.subplots(
            2,
            len(fits),
            figsize=(3.8 * len(fits) + 0.8, 5.2),
            squeeze=False,
            sharex=True,
            layout="constrained",
        )
        for column, fit in enumerate(fits):
            top, bottom = axes_2C[:, column]
            mine = [row for row in points if row["batch"] == fit["batch"]]
            for row in mine:
                dots = 1000 * np.asarray(row["tpot_s"])
                top.plot([row["a"]] * dots.size, dots, ".", color=COLOURS[0])
            x_N = np.linspace(mine[0]["a"], mine[-1]["a"], 100)
            fitted = np.polynomial.Polynomial(fit["coefficients"])(x_N)
            top.plot(x_N, 1000 * fitted, color=COLOURS[1], label="fit")
            budget = 1000 * fit["budget_tpot_s"]
            _control(top, budget, f"budget {budget:.2f} ms")
            if fit["a"] is not None:
                top.plot(fit["a"], budget, "D", color=COLOURS[4], label="chosen a")
            top.set_title(f"batch {fit['batch']}", loc="left")
            top.set_ylabel("time per token step (ms)")
            top.legend(frameon=False)
            low, high = np.asarray([r["agreement_interval95"] for r in mine]).T
            a_N = [row["a"] for row in mine]
            bottom.fill_between(a_N, low, high, color=COLOURS[2], alpha=0.2, lw=0)
            agreement = [row["agreement"] for row in mine]
            bottom.plot(a_N, agreement, "o-", color=COLOURS[2], markersize=3)
            bottom.set_ylabel("agreement with the model")
            bottom.set_xlabel("a")
            top.grid(alpha=0.25)
            bottom.grid(alpha=0.25)
        _finish(figure, path, title)
