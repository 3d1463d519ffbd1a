"""The picture of a fidelity card."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.evaluate.agreement import INTERVALS, rule_of
from moe_edge.evaluate.fidelity import Deferral
from moe_edge.metrics.plots_panels import Panel, bounded, draw_panels
from moe_edge.route.base import ROUTES

Cards = Sequence[Mapping[str, Any]]


def strength_of(kind: str) -> str | None:
    """The field of a lossy option's cards that says how strong it is; of a deferral
    the assist."""
    if kind == Deferral.name:
        return "assist"
    return ROUTES[kind].strength if kind in ROUTES else None


def plot(path: Path, cards: Cards, *, title: str) -> None:
    """Agreement and perplexity ratio over a (or threshold), one column a budget."""
    half = next(card for card in cards if card["control"])
    lossy = [card for card in cards if not card["control"]]
    budgets = list(dict.fromkeys(card["device_memory"] for card in lossy))
    kinds = list(dict.fromkeys(card["option"] for card in lossy))
    kinds = [kind for kind in kinds if strength_of(kind)]
    panels = []
    for kind, key, budget in itertools.product(kinds, INTERVALS, budgets):
        here = [c for c in lossy if (c["option"], c["device_memory"]) == (kind, budget)]
        strength = strength_of(kind)
        x = sorted({c[strength] for c in here})
        points = []
        for found in here:
            named = {"weights": kind, "renormalise": False, **found}
            rule = rule_of(named)
            at = f"{rule}, batch {found['batch']}", x.index(found[strength])
            points.append((*at, found[key], found[INTERVALS[key]]))
        titles = f"{kind}, {budget} of the experts' bytes", key.replace("_", " ")
        more = {"x_label": strength, "level": (half["option"], half[key])}
        panels.append(Panel(*titles, x, **bounded(len(x), points), **more))
    draw_panels(path, panels, title=title, columns=len(budgets), share_y=True)
