"""What methods gave on the same requests, and sums over seeds (Prism)."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.metrics.results import metric

EPLB, PRISM, OPTIMUM, OURS = "eplb_heterogeneous", "prism", "optimal", "latency"
MEAN, LOCAL = "mean_latency_s", "local_ratio"
SPREAD = "half range of seeds"
EQUAL = 5e-4  # relative: latencies closer than that count as equal
# (method that ought to win, over).
EXPECTED = (
    *((OURS, OPTIMUM), (OURS, PRISM), (OURS, EPLB)),
    *((OPTIMUM, PRISM), (PRISM, EPLB)),
)
Pairs = Sequence[tuple[str, str]]  # (method, over)
Row = dict[str, Any]


def median_row(
    method: str, name: str, found: Sequence[float], unit: str = "s"
) -> dict[str, Any]:
    """A metric: the median over seeds with half their range."""
    spread = (SPREAD, float(np.ptp(found)) / 2)
    return metric(method, name, float(np.median(found)), unit, len(found), spread)


def percent(found: Sequence[float]) -> str:
    """How far a ratio is from 1, such as `-12.3 %`; the median over seeds."""
    return f"{100 * (float(np.median(found)) - 1):+.1f} %"


def percents(ratios: Iterable[Sequence[float]]) -> str:
    """The least and the largest of several changes, such as `-12.3 to -3.4 %`."""
    medians = [100 * (float(np.median(found)) - 1) for found in ratios]
    low, high = min(medians), max(medians)
    return f"{low:+.1f} %" if low == high else f"{low:+.1f} to {high:+.1f} %"


def slower(ratios: np.ndarray) -> int:
    """In how many seeds a ratio of latencies is above 1 by more than EQUAL."""
    return int((ratios > 1 + EQUAL).sum())


@dataclasses.dataclass(frozen=True)
class MethodRuns:
    """Runs of several methods on the same cases, so that ratios are of pairs.

    Attributes:
      rows: by method, `ClusterResult.row` of every seed.
    """

    rows: Mapping[str, Sequence[Row]]

    def values(self, method: str, key: str = MEAN) -> np.ndarray:
        """float64 [seeds]."""
        return np.array([row[key] for row in self.rows[method]], np.float64)

    def only(self, *keys: str) -> "MethodRuns":
        """With no more than these keys of rows."""
        return MethodRuns(
            {
                method: [{key: row[key] for key in keys} for row in by_seed]
                for method, by_seed in self.rows.items()
            }
        )

    def median(self, method: str, key: str = MEAN) -> float:
        return float(np.median(self.values(method, key)))

    def ratio(self, method: str, over: str) -> np.ndarray:
        """float64 [seeds]: one method's mean latency over another's, seed by seed."""
        return self.values(method) / self.values(over)

    def change(self, method: str, over: str) -> str:
        """`percent` of their ratio."""
        return percent(self.ratio(method, over))

    def changes(self, pairs: Pairs) -> dict[str, str]:
        """`method to over` -> change."""
        return {" to ".join(pair): self.change(*pair) for pair in pairs}

    def metrics(self, at: str, pairs: Pairs = ()) -> list[dict[str, Any]]:
        """Mean latency and local ratio of all methods, latency ratios of some."""
        rows = []
        for method in self.rows:
            for name, key, unit in (
                ("mean latency", MEAN, "s"),
                ("local ratio", LOCAL, "1"),
            ):
                found = self.values(method, key)
                rows.append(median_row(method, f"{name}, {at}", found, unit))
        for method, over in pairs:
            name, found = f"latency over {over}, {at}", self.ratio(method, over)
            rows.append(median_row(method, name, found, "1"))
        return rows

    def cells(self) -> dict[str, list[float]]:
        """By method, seconds on each server and over all requests; medians."""
        found = {}
        for method, by_seed in self.rows.items():
            table = np.array([[*row["latency_s_N"], row[MEAN]] for row in by_seed])
            found[method] = [round(float(x), 4) for x in np.median(table, axis=0)]
        return found

    def is_complete(self) -> bool:
        """All latencies are there, and none is negative."""
        return all(
            None not in row["latency_s_N"] and min(row["latency_s_N"]) > 0
            for by_seed in self.rows.values()
            for row in by_seed
        )

    def losses(self, method: str, over: str) -> str | None:
        """In how many seeds a method that ought to win was slower; None if in none."""
        if not {method, over} <= set(self.rows):
            return None
        found = self.ratio(method, over)
        if not (worse := slower(found)):
            return None
        return (
            f"{method} slower than {over} in {worse} of {len(found)} seeds "
            f"(median {percent(found)})"
        )


def worse_than(points: Mapping[str, MethodRuns]) -> str:
    """Where our placer or the optimum of eq. 2 loses, case by case."""
    found = []
    for label, served in points.items():
        lost = [text for pair in EXPECTED if (text := served.losses(*pair))]
        if lost:
            found.append(f"{label}: {'; '.join(lost)}")
    return "Slower than it should be: " + (" | ".join(found) or "nowhere") + "."


def stored(points: Mapping[str, MethodRuns]) -> dict[str, str]:
    """The file with all seeds, without the list of decisions."""
    kept = {
        label: {
            method: [
                {key: value for key, value in row.items() if key != "migrations"}
                for row in by_seed
            ]
            for method, by_seed in served.rows.items()
        }
        for label, served in points.items()
    }
    return {"by_seed.json": json.dumps(kept, indent=1, allow_nan=False) + "\n"}
