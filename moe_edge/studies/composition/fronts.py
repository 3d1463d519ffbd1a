"""What the rows say: fronts of time a token over perplexity ratio, and two bars."""

from collections.abc import Collection
from typing import Any

import pandas as pd

from moe_edge.metrics.frames import Tables, frame
from moe_edge.studies.composition.methods import COMPOSED

MOST_RATIO = 1.01  # of the perplexity
MARGIN, FEWER = 0.05, 0.5  # the bars: a single method's lead, and bytes
MIDDLE = 0.25  # the budget of the second
BASELINE = "lru"
GROUPS = tuple(
    f"{what}, {formats}"
    for formats in ("bfloat16", "any format")
    for what in ("alone", COMPOSED)
)
FRAMES = {
    "points": frame(
        "method family format budget", "slots moved moved_kb agreement ratio"
    ),
    "times": frame("method budget link", "tpot_ms"),
    "quality": frame("model", "ratio exact_match questions"),
    "live": frame("method budget link", "tpot_ms misses"),
}


def joined(tables: Tables) -> pd.DataFrame:
    """Every method at every budget and link: its time and what it is."""
    return tables["times"].merge(tables["points"], on=["method", "budget"])


def members(points: pd.DataFrame, group: str) -> pd.DataFrame:
    """Those of one of `GROUPS`, or the baseline."""
    if group == BASELINE:
        return points[points.method == BASELINE]
    what, formats = group.split(", ")
    chosen = (points.family == COMPOSED) == (what == COMPOSED)
    if formats == "bfloat16":
        chosen &= points.format == formats
    return points[chosen]


def least(points: pd.DataFrame, measure: str) -> dict[str, Any] | None:
    """The row with the least of a measure whose perplexity ratio is within the bound;
    None: there is none."""
    good = points[points.ratio <= MOST_RATIO]
    return None if good.empty else good.loc[good[measure].idxmin()].to_dict()


def front(points: pd.DataFrame) -> pd.DataFrame:
    """Those that no other one beats in both, by ratio."""
    ordered = points.sort_values(["ratio", "tpot_ms"], kind="stable")
    before_ms = ordered.tpot_ms.cummin().shift(fill_value=float("inf"))
    return ordered[ordered.tpot_ms < before_ms]


def middle(points: pd.DataFrame) -> pd.DataFrame:
    """Those of the middle budget."""
    budgets = points.budget.unique()
    nearest = min(budgets, key=lambda budget: abs(float(budget[:-1]) / 100 - MIDDLE))
    return points[points.budget == nearest]


def live_cases(
    points: pd.DataFrame, names: Collection[str], count: int
) -> list[dict[str, Any]]:
    """Rows to run in real time: what moves least of each group at the middle budget, by
    link. Bytes are the same in all starts, as times are not.

    Args:
      names: of the methods that can; count: of rows, at most.
    """
    here = middle(points[points.method.isin(names)])
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for link in sorted(here.link.unique(), key=lambda factor: abs(factor - 2)):
        some = here[here.link == link]
        for group in (BASELINE, *GROUPS):
            if (row := least(members(some, group), "moved_kb")) is not None:
                found.setdefault((row["method"], link), row)
    return list(found.values())[:count]


def derive(tables: Tables) -> dict[str, Any]:
    """The best of each group, the fronts, and both bars."""
    bests, fronts, leads = [], [], []
    for at, here in joined(tables).groupby(["budget", "link"], sort=False):
        where, found = dict(zip(("budget", "link"), at, strict=True)), {}
        for group in (BASELINE, *GROUPS):
            some = members(here, group)
            if group != BASELINE:
                points = front(some)[["ratio", "tpot_ms"]].to_dict("records")
                fronts += [where | {"group": group} | point for point in points]
            if (row := least(some, "tpot_ms")) is not None:
                found[group] = row
                bests.append(where | {"group": group, "what": _said(row)})
        alone, ours = (found.get(group) for group in GROUPS[:2])
        if alone and ours:
            leads.append(where | {"lead": alone["tpot_ms"] / ours["tpot_ms"] - 1})
    is_unbeaten = bool(leads) and min(row["lead"] for row in leads) >= -MARGIN
    numbers = {"bests": bests, "fronts": fronts, "leads": leads}
    numbers |= {"fewest": _fewest(tables["points"]), "replayed": _replayed(tables)}
    fewer = numbers["fewest"] is not None and numbers["fewest"]["share"] <= FEWER
    checks = {
        "bfloat16: no method alone beats the composition by over 5 %": is_unbeaten,
        "any format: at most half the bytes of bfloat16's best at 25 %": fewer,
    }
    return numbers | {"checks": checks}


def _said(row: dict[str, Any]) -> str:
    return (
        f"{row['tpot_ms']:.2f} ms, {row['moved_kb']:.4g} kB, x{row['ratio']:.3f}: "
        f"{row['method']}"
    )


def _fewest(points: pd.DataFrame) -> dict[str, Any] | None:
    """Of the middle budget, what moves least: `share` of the bytes of the bfloat16
    one."""
    here = middle(points)
    is_bfloat16 = here.format == "bfloat16"
    base = least(here[is_bfloat16], "moved_kb")
    other = least(here[~is_bfloat16], "moved_kb")
    if base is None or other is None:
        return None
    share = other["moved_kb"] / max(base["moved_kb"], 1e-12)
    kept = {name: other[name] for name in ("budget", "method", "ratio")}
    return kept | {"share": share, "base": base["method"]}


def _replayed(tables: Tables) -> list[dict[str, Any]]:
    """What ran in real time, and by how much its replay errs."""
    if "live" not in tables:
        return []
    keys = ["method", "budget", "link"]
    found = tables["live"].merge(tables["times"], on=keys, suffixes=("", "_replay"))
    found["error"] = (found.tpot_ms / found.tpot_ms_replay - 1).abs()
    return found.to_dict("records")
