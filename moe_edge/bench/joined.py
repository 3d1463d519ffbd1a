"""What starts say together: means, and intervals of a bootstrap.

Values are means over the starts; intervals come from drawing starts, and of each its
observations, again and again, also for what the study derives from its tables.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError, check_count
from moe_edge.metrics.frames import INTERVAL, Estimate, Rows, plain, tables
from moe_edge.metrics.ranged import leaves, unlike

RESAMPLES = 500
Start = Mapping[str, Any]  # as of `starts_file.py`


@dataclasses.dataclass(frozen=True)
class Joined:
    """What starts say together.

    Attributes:
      rows: means over the starts, with intervals.
      intervals: path of a number that is derived from them, joined by slashes -> its
        bounds.
    """

    rows: Rows
    intervals: dict[str, list[float]]


def join(study: Study, starts: Sequence[Start], seed: int = 0) -> Joined:
    """The rows of all starts in one table, and 95 % intervals.

    Raises:
      ConfigError: no start, or one that gave other rows than the first (of `partial`
        frames: no row that all have).
    """
    check_count("starts", len(starts))
    starts = _in_all(study.partial, starts)
    cells = _Cells(study, starts)
    rng, drawn = np.random.default_rng(seed), []
    for _ in range(RESAMPLES if len(starts) > 1 else 0):
        drawn.append(cells.draw(rng))
    rows = cells.rows(cells.means(), np.stack(drawn) if drawn else None)
    for start in starts:
        for name, held in start["checks"].items():
            rows.checks[name] = rows.checks.get(name, True) and held
    rows.about, rows.files = dict(starts[0]["about"]), dict(starts[0]["files"])
    # Of few starts there are few draws: three of two starts with an observation each.
    different = {means.tobytes(): means for means in drawn}
    numbers = {k: derived(study, cells.rows(v)) for k, v in different.items()}
    each = [numbers[means.tobytes()] for means in drawn]
    return Joined(rows, _intervals(derived(study, rows), each))


def derived(study: Study, rows: Rows) -> Any:
    """What the study derives from rows, without its checks."""
    numbers = plain(study.derive(tables(rows.stored())))
    numbers.pop("checks", None)
    return numbers


def _intervals(numbers: Any, each: Sequence[Any]) -> dict[str, list[float]]:
    """Of each number that every draw has."""
    by_path = [dict(leaves(one, skip=unlike(one, numbers))) for one in each]
    found = {}
    for path, _ in leaves(numbers):
        drawn = [one[path] for one in by_path if path in one]
        if drawn and len(drawn) == len(by_path):
            bounds = np.percentile(drawn, (2.5, 97.5)).tolist()
            found["/".join(map(str, path))] = bounds
    return found


class _Cells:
    """Every measure of every row, in a flat order that all starts share."""

    def __init__(self, study: Study, starts: Sequence[Start]):
        self._study, self._first = study, starts[0]["frames"]
        starts = [_in_order(start, self._first) for start in starts]
        self._places = [
            (name, number, measure)
            for name, found in self._first.items()
            for number, row in enumerate(found)
            for measure in row["values"]
        ]
        shape = _shape(self._first)
        for start in starts:
            if _shape(start["frames"]) != shape:
                raise ConfigError(
                    f"start {start['number']} gave other rows than start "
                    f"{starts[0]['number']}; they cannot be joined: measure again with "
                    "--overwrite"
                )
        self._keys = {
            name: _keys(name, [start["frames"][name] for start in starts])
            for name in self._first
        }
        self._starts = [
            _by_count([s["frames"][n][i]["values"][m] for n, i, m in self._places])
            for s in starts
        ]

    def means(self) -> np.ndarray:
        """Of each cell over the starts."""
        every = [_means_of(start, lambda _: slice(None)) for start in self._starts]
        return np.mean(every, axis=0)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """`means` of starts drawn with replacement, each with its observations drawn
        so: the same ones in all cells that have as many. The same starts, drawn in
        another order, have the same means to the bit."""
        drawn = rng.integers(len(self._starts), size=len(self._starts))
        found = [
            _means_of(self._starts[start], lambda n: rng.integers(n, size=n))
            for start in drawn
        ]
        return np.mean([found[at] for at in np.argsort(drawn, kind="stable")], axis=0)

    def rows(self, means: np.ndarray, drawn: np.ndarray | None = None) -> Rows:
        """Rows with these means, and bounds: of the draws, where they are given, and of
        what a start knew itself. A study may derive what it does from bounds, so rows
        of a single draw have some, too."""
        rows = Rows(self._study.frames)
        cells: dict[tuple[str, int], dict[str, Any]] = {}
        for place, (name, number, measure) in enumerate(self._places):
            value = float(means[place])
            within = self._first[name][number]["within"].get(measure, (0.0, 0.0))
            bounds = [value - within[0], value + within[1]]
            if drawn is not None:
                bounds += np.percentile(drawn[:, place], (2.5, 97.5)).tolist()
            ends = min(bounds), max(bounds)
            cell = Estimate(value, len(self._starts), *ends, INTERVAL)
            cells.setdefault((name, number), {})[measure] = cell
        for name, found in self._keys.items():
            for number, keys in enumerate(found):
                rows(name, *keys, **cells.get((name, number), {}))
        return rows


def _by_count(values: Sequence[Sequence[float]]) -> dict[int, tuple]:
    """By how many observations a cell has, fewest first: the places of these cells, and
    float64 [cells, observations]."""
    counts, found = np.array([len(cell) for cell in values]), {}
    for count in sorted(set(counts.tolist())):
        (at,) = np.nonzero(counts == count)
        found[count] = at, np.array([values[place] for place in at], float)
    return found


def _means_of(start: dict[int, tuple], chosen: Callable[[int], Any]) -> np.ndarray:
    """Of each cell over the observations chosen of so many, float64 [cells]."""
    found = np.empty(sum(len(at) for at, _ in start.values()))
    for count, (at, values) in start.items():
        found[at] = values[:, chosen(count)].mean(axis=1)
    return found


def _in_all(partial: Collection[str], starts: Sequence[Start]) -> Sequence[Start]:
    """Starts, of these frames with the rows that all of them have.

    Raises:
      ConfigError: there is none.
    """
    found = [{**start, "frames": dict(start["frames"])} for start in starts]
    for name in partial:
        keys = [{(*row["keys"],) for row in s["frames"].get(name, ())} for s in starts]
        if not (shared := set.intersection(*keys)):
            raise ConfigError(f"no row of frame {name} is in all starts; measure more")
        for start in found:
            rows = start["frames"][name]
            rows = [row for row in rows if (*row["keys"],) in shared]
            start["frames"][name] = rows
    return found


def _in_order(start: Start, first: Mapping[str, Sequence[Mapping]]) -> Start:
    """A start with its rows in the order of the first's, where both have the same
    keys."""
    frames = dict(start["frames"])
    for name in first.keys() & frames.keys():
        wanted = [tuple(row["keys"]) for row in first[name]]
        found = {tuple(row["keys"]): row for row in frames[name]}
        if len(found) == len(frames[name]) and found.keys() == set(wanted):
            frames[name] = [found[keys] for keys in wanted]
    return {**start, "frames": frames}


def _shape(frames: Mapping[str, Sequence[Mapping]]) -> list:
    """Which measures the rows have."""
    return [
        [name, [sorted(row["values"]) for row in found]]
        for name, found in frames.items()
    ]


def _side_by_side(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else " / ".join(map(str, values))


def _keys(name: str, frames: Sequence[Sequence[Mapping]]) -> list[list]:
    """Keys of a frame's rows. Texts that starts found each for themselves, such as who
    was fastest, stand side by side.

    Raises:
      ConfigError: rows that only such keys tell apart, or other ones.
    """
    columns = [zip(*(row["keys"] for row in rows), strict=True) for rows in frames]
    sure, found = [], []
    for values in zip(*columns, strict=True):  # of a key, by start
        if all(value == values[0] for value in values):
            sure.append(values[0])
            found.append(values[0])
        else:
            each = (dict.fromkeys(one) for one in zip(*values, strict=True))
            found.append([_side_by_side(list(one)) for one in each])
    rows = len(frames[0])
    if len(found) > len(sure) and len(set(zip(*sure, strict=True))) < rows:
        raise ConfigError(
            f"starts gave other rows of frame {name}; they cannot be joined: measure "
            "again with --overwrite"
        )
    return [list(row) for row in zip(*found, strict=True)] or [[] for _ in range(rows)]
