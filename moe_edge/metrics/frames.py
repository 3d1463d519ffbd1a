"""Rows of a study, in frames: keys say what a row is of, measures have units.

A frame is declared (`frame`), filled row by row while a study measures (`Rows`), stored
in `result.json` and read as a pandas table (`tables`), of which all numbers, pictures
and tables of a page are made. A measure is a number or an estimate, which comes with
how many observations stand behind it and where they lie, from low to high.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moe_edge.core.checks import ConfigError, check_known

# What an estimate's bounds are.
OF_ROUNDS, OF_SEEDS = "range of rounds", "range of seeds"
INTERVAL, NO_BOUNDS = "95 % interval", "none"
N, LOW, HIGH = "_n", "_low", "_high"  # what estimates add to a measure's name


Tables = Mapping[str, pd.DataFrame]  # frames by name


class Estimate(NamedTuple):
    """A measure of several observations.

    Attributes:
      n: how many they are.
      low, high: bounds, of what `kind` names.
      values: the observations, where they are known.
    """

    value: float
    n: int
    low: float
    high: float
    kind: str
    values: tuple[float, ...] = ()


def ranging(
    value: float, values: Sequence[float], kind: str = OF_ROUNDS, scale: float = 1.0
) -> Estimate:
    """The `Estimate` of a value by what rounds or seeds gave, all times `scale`."""
    found = tuple(scale * float(one) for one in values)
    bounds = min(found, default=scale * value), max(found, default=scale * value)
    return Estimate(scale * float(value), len(found), *bounds, kind, found)


def median(
    values: Sequence[float], kind: str = OF_ROUNDS, scale: float = 1.0
) -> Estimate:
    """Likewise, of their median."""
    return ranging(float(np.median(values)), values, kind, scale)


def of_seeds(values: Sequence[float]) -> Estimate:
    """The `Estimate` of what seeds gave, by their median."""
    return median(values, OF_SEEDS)


def interval(value: float, bounds: Sequence[float], n: int) -> Estimate:
    """The `Estimate` with a 95 % interval."""
    return Estimate(float(value), n, *map(float, bounds), INTERVAL)


def counted(value: float, n: int) -> Estimate:
    """The `Estimate` of so many observations whose bounds are not known."""
    return Estimate(value, n, value, value, NO_BOUNDS)


@dataclasses.dataclass(frozen=True)
class Frame:
    """Columns of a frame: `keys`, and `units` by measure, "1" for a plain number."""

    keys: tuple[str, ...]
    units: Mapping[str, str]


# The last word of a measure's name -> its unit; all others are plain numbers.
UNITS = {"s": "s", "ms": "ms", "us": "us", "kb": "kB", "mb": "MB", "bytes": "bytes"}


def frame(keys: str, measures: str = "", **units: str) -> Frame:
    """A frame of keys and measures, the words of both.

    Args:
      measures: such as `tpot_ms rate:tokens/s`: with a unit that the name does not say.
      units: of further ones.
    """
    named = (measure.partition(":") for measure in measures.split())
    told = {
        name: unit or UNITS.get(name.rpartition("_")[2], "1") for name, _, unit in named
    }
    return Frame(tuple(keys.split()), told | units)


class Rows:
    """What a study measures; called with a frame's name and a row, whose measures may
    be missing.

    Attributes:
      checks: name -> whether it holds, of what only measuring can see.
      about: what is said of the run beside rows: model, workload, seeds, ...
      files: further text files of the entry by name.
    """

    def __init__(self, frames: Mapping[str, Frame]):
        self.frames = frames
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in frames}
        self.checks: dict[str, bool] = {}
        self.about: dict[str, Any] = {}
        self.files: dict[str, str] = {}

    def __call__(self, name: str, *values: Any, **row: Any) -> None:
        """Adds a row; `values` are of its first keys.

        Raises:
          ConfigError: no such frame, other columns, or a measure that is not finite.
        """
        check_known("frame", name, self.frames)
        keys, units = self.frames[name].keys, self.frames[name].units
        row = dict(zip(keys, values, strict=False)) | row
        if wrong := {*keys} - {*row} | {*row} - {*keys} - {*units}:
            raise ConfigError(
                f"a row of frame {name} lacks or adds {sorted(wrong)}, expected keys "
                f"{list(keys)} and measures of {list(units)}"
            )
        for measure in (one for one in units if row.get(one) is not None):
            given = row[measure]
            estimated = isinstance(given, Estimate)
            for value in (given.value, given.low, given.high) if estimated else [given]:
                if not math.isfinite(value):
                    raise ConfigError(
                        f"{measure} of frame {name} is {value}, not finite"
                    )
        self.rows[name].append(row)

    def stored(self) -> dict[str, Any]:
        """`frames` of a results entry; those without rows are left out."""
        return {
            name: _stored(self.frames[name], rows)
            for name, rows in self.rows.items()
            if rows
        }


def _stored(declared: Frame, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    units = {
        measure: unit
        for measure, unit in declared.units.items()
        if any(row.get(measure) is not None for row in rows)
    }
    bounds = {
        measure: row[measure].kind
        for row in rows
        for measure in units
        if isinstance(row.get(measure), Estimate)
    }
    lines = [
        [*(_plain(row[key]) for key in declared.keys)]
        + [_cell(row.get(measure)) for measure in units]
        for row in rows
    ]
    keys = list(declared.keys)
    return {"keys": keys, "units": units, "bounds": bounds, "rows": lines}


def _plain(value: Any) -> Any:
    """A key without NumPy's types."""
    return value.item() if isinstance(value, np.generic) else value


def _cell(value: Any) -> Any:
    if isinstance(value, Estimate):
        return [float(value.value), int(value.n), float(value.low), float(value.high)]
    return None if value is None else float(value)


def table(stored: Mapping[str, Any]) -> pd.DataFrame:
    """A stored frame. A measure with estimates has columns NAME_n, NAME_low and
    NAME_high, too; those of a plain number are 1 and itself."""
    columns: dict[str, list] = {}
    for place, key in enumerate(stored["keys"]):
        columns[key] = [row[place] for row in stored["rows"]]
    for place, measure in enumerate(stored["units"], len(stored["keys"])):
        cells = (row[place] for row in stored["rows"])
        cells = [math.nan if cell is None else cell for cell in cells]
        parts = [c if isinstance(c, list) else [c, 1, c, c] for c in cells]
        ends = ("", N, LOW, HIGH) if measure in stored["bounds"] else ("",)
        for end, values in zip(ends, zip(*parts, strict=True), strict=False):
            columns[measure + end] = list(values)
    return pd.DataFrame(columns)


def tables(frames: Mapping[str, Any]) -> Tables:
    """All stored frames by name."""
    return {name: table(stored) for name, stored in frames.items()}


def plain(value: Any) -> Any:
    """Numbers, texts, lists and tables as JSON holds them; a table is a list of rows,
    without what is missing."""
    if isinstance(value, pd.DataFrame):
        return plain(value.to_dict("records"))
    if isinstance(value, Mapping):
        parts = {str(key): plain(item) for key, item in value.items()}
        return {key: item for key, item in parts.items() if item is not None}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
