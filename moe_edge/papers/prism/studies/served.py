"""What methods gave on the same requests, and sums over seeds (Prism)."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_edge.metrics.frames import Frame, Rows, frame, of_seeds

EPLB, PRISM, OPTIMUM, OURS = "eplb_heterogeneous", "prism", "optimal", "latency"
MEAN, LOCAL = "mean_latency_s", "local_ratio"
EQUAL = 5e-4  # relative: latencies closer than that count as equal
# (method that ought to win, over).
EXPECTED = (
    *((OURS, OPTIMUM), (OURS, PRISM), (OURS, EPLB)),
    *((OPTIMUM, PRISM), (PRISM, EPLB)),
)
Pairs = Sequence[tuple[str, str]]  # (method, over)
Row = dict[str, Any]


def frames_at(keys: str, *, servers: bool = True) -> dict[str, Frame]:
    """Frames that `MethodRuns.tell` fills, with these keys first."""
    found = {
        "methods": frame(f"{keys} method", "mean_s local"),
        "over": frame(f"{keys} method over", "ratio worse seeds"),
    }
    of_servers = {"servers": frame(f"{keys} server method", "seconds:s")}
    return found | (of_servers if servers else {})


def losses(over: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """Where our placer or the optimum of eq. 2 is slower than it should be, in words
    in column `where`."""
    pairs = pd.Series(zip(over.method, over.over, strict=True), index=over.index)
    found = over[pairs.isin(EXPECTED) & (over.worse > 0)]
    named = found[[*keys]].apply(lambda row: ", ".join(filter(None, row)), axis=1)
    return found.assign(where=named if len(found) else "")


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

    def tell(self, rows: Rows, *at: Any, pairs: Pairs = ()) -> None:
        """Adds all methods, seconds on each server and over all requests, and ratios of
        some pairs with how many seeds were slower; `at`: further keys, the first."""
        for method in self.rows:
            mean, local = (self.values(method, key) for key in (MEAN, LOCAL))
            values = {
                "mean_s": of_seeds(mean),
                "local": of_seeds(local),
            }
            rows("methods", *at, method, **values)
        for method, cells in self.cells().items() if "servers" in rows.frames else ():
            for server, seconds in enumerate(cells[:-1], 1):
                rows("servers", *at, str(server), method, seconds=seconds)
            rows("servers", *at, "all", method, seconds=cells[-1])
        for method, over in dict.fromkeys([*pairs, *EXPECTED]) if pairs else ():
            if {method, over} <= set(self.rows):
                found = self.ratio(method, over)
                ratio, worse = of_seeds(found), slower(found)
                given = {"worse": worse, "seeds": len(found)}
                rows("over", *at, method, over, ratio=ratio, **given)

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
