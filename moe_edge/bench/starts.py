"""Starts: a study in fresh processes, a round each, and what they say together.

Rounds of one process share its compiled programs, its memory and its hour, so their
spread says too little. A start has a process, an order and prompts of its own. A start
beside which others took over a tenth of the processors is marked and repeated. Values
are means over the starts; intervals come from drawing starts, and of each its
observations, again and again, also for what the study derives from its tables.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.started import started
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.json_reader import as_read_back, read_json
from moe_edge.core.process import CpuUse, alone
from moe_edge.metrics.frames import INTERVAL, Estimate, Frame, Rows, plain, tables
from moe_edge.metrics.machine import git_state
from moe_edge.metrics.ranged import leaves, unlike

FILE = "starts.json"
MOST_OTHERS = 0.1  # of the processors
TRIES = 3  # of a start
RESAMPLES = 500
Start = dict[str, Any]  # facts of `_taken`, and what `run_start` returned
Run = Callable[[str, Any, int], Mapping[str, Any]]


def of_start(study: Study, settings: Any, number: int) -> Any:
    """The settings of a start; those with a seed take another in each.

    Raises:
      ConfigError: a study that cannot be measured in starts.
    """
    if not study.frames:
        raise ConfigError(
            f"study {study.name} keeps no rows, so --starts cannot join them; leave it "
            "out"
        )
    known = {field.name for field in dataclasses.fields(settings)}
    if unknown := study.start.keys() - known:
        raise ConfigError(
            f"study {study.name} has no {', '.join(sorted(unknown))} to cut to one in "
            "a start; leave --starts out"
        )
    given = dict(study.start)
    if "seed" in known - given.keys():
        given["seed"] = settings.seed + number
    return dataclasses.replace(settings, **given)


def run_start(name: str, settings: Any, number: int) -> dict[str, Any]:
    """Measures a study as start `number`, with the settings of one, in a process of
    its own."""
    from moe_edge.bench.registry import find  # which imports the driver

    study = find(name)
    if study.inline:
        from moe_edge.engine.inline import run_inline

        run_inline()
    rows = Rows(study.frames)
    with started(number):
        study.measure(settings, rows)
    return kept(rows)


def kept(rows: Rows) -> dict[str, Any]:
    """What a start leaves: of every measure its observations."""
    frames = {
        name: [_kept_row(rows.frames[name], row) for row in found]
        for name, found in rows.rows.items()
        if found
    }
    said = {"checks": rows.checks, "about": rows.about, "files": rows.files}
    return as_read_back({"frames": frames} | said)


def _kept_row(declared: Frame, row: Mapping[str, Any]) -> dict[str, Any]:
    values, within = {}, {}
    for measure in declared.units:
        given = row.get(measure)
        if isinstance(given, Estimate):
            values[measure] = list(given.values) or [float(given.value)]
            if given.kind == INTERVAL:
                within[measure] = float(given.spread)
        elif given is not None:
            values[measure] = [float(given)]
    keys = [plain(row[key]) for key in declared.keys]
    return {"keys": keys, "values": values, "within": within}


def take_starts(
    study: Study,
    settings: Any,
    count: int,
    before: Sequence[Start] = (),
    run: Run | None = None,
) -> list[Start]:
    """Starts made before, and `count` more.

    Args:
      run: what measures a start; None: `run_start` in a fresh process.
    """
    run = run or (lambda *args: alone(run_start, *args))
    found, first = list(before), 1 + max((s["number"] for s in before), default=-1)
    for number in range(first, first + count):
        for _ in range(TRIES):
            found.append(_taken(study, settings, number, run))
            one = found[-1]
            others = "unknown" if one["others"] is None else f"{one['others']:.0%}"
            print(f"start {number}: {one['wall_s']:.0f} s, others' CPU {others}")
            if not one["busy"]:
                break
    return found


def _taken(study: Study, settings: Any, number: int, run: Run) -> Start:
    """A start, and day, commit and load."""
    began_s, load, use = time.time(), os.getloadavg()[0], CpuUse.now()
    measured = run(study.name, of_start(study, settings, number), number)
    others = use.others(CpuUse.now()) if use else None
    facts = {
        "number": number,
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began_s)),
        "wall_s": round(time.time() - began_s, 1),
        "commit": git_state()["commit"],
        "load_before": round(load, 2),
        "others": None if others is None else round(others, 3),
        "busy": others is not None and others > MOST_OTHERS,
    }
    return facts | dict(measured)


def used(starts: Sequence[Start]) -> list[Start]:
    """Of each number the last try."""
    return list({start["number"]: start for start in starts}.values())


def facts_of(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """What an entry says of each try: all but what was measured."""
    measured = ("frames", "checks", "about", "files")
    last = {id(start) for start in used(starts)}
    return [
        {key: value for key, value in start.items() if key not in measured}
        | {"used": id(start) in last}
        for start in starts
    ]


def stored_text(settings: Any, starts: Sequence[Start]) -> str:
    """The file of an entry to which further starts can be added."""
    about = {"settings": plain(dataclasses.asdict(settings)), "starts": list(starts)}
    return json.dumps(as_read_back(about), indent=None) + "\n"


def read_starts(out_dir: str | Path, settings: Any) -> list[Start]:
    """Those of an entry, for more.

    Raises:
      ConfigError: there are none, or they were made with other settings.
    """
    path = Path(out_dir) / FILE
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: only an entry made with --starts can be added to; "
            "take --overwrite instead of --append"
        )
    stored = read_json(path)
    wanted = as_read_back(plain(dataclasses.asdict(settings)))
    elsewhere = {"data_dir"}
    for name in sorted(wanted.keys() - elsewhere):
        if (was := stored["settings"].get(name)) != wanted[name]:
            raise ConfigError(
                f"{path} was measured with {name} {was}, {wanted[name]} is asked for; "
                "keep the settings, or take --overwrite instead of --append"
            )
    return stored["starts"]


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
      ConfigError: no start, or one that gave other rows than the first.
    """
    check_count("starts", len(starts))
    cells = _Cells(study, starts)
    rng, drawn = np.random.default_rng(seed), []
    for _ in range(RESAMPLES if len(starts) > 1 else 0):
        drawn.append(cells.draw(rng))
    rows = cells.rows(cells.means(), np.stack(drawn) if drawn else None)
    for start in starts:
        for name, held in start["checks"].items():
            rows.checks[name] = rows.checks.get(name, True) and held
    rows.about, rows.files = dict(starts[0]["about"]), dict(starts[0]["files"])
    derived = [_derived(study, cells.rows(means)) for means in drawn]
    return Joined(rows, _intervals(_derived(study, rows), derived))


def _derived(study: Study, rows: Rows) -> Any:
    numbers = plain(study.derive(tables(rows.stored())))
    numbers.pop("checks", None)
    return numbers


def _intervals(numbers: Any, derived: Sequence[Any]) -> dict[str, list[float]]:
    """Of each number that every draw has."""
    by_path = [dict(leaves(each, skip=unlike(each, numbers))) for each in derived]
    found = {}
    for path, _ in leaves(numbers):
        drawn = [each[path] for each in by_path if path in each]
        if drawn and len(drawn) == len(by_path):
            bounds = np.percentile(drawn, (2.5, 97.5)).tolist()
            found["/".join(map(str, path))] = bounds
    return found


class _Cells:
    """Every measure of every row, in a flat order that all starts share."""

    def __init__(self, study: Study, starts: Sequence[Start]):
        self._study, self._first = study, starts[0]["frames"]
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
            [
                np.asarray(s["frames"][n][i]["values"][m], float)
                for n, i, m in self._places
            ]
            for s in starts
        ]

    def means(self) -> np.ndarray:
        """Of each cell over the starts."""
        return np.mean([[v.mean() for v in one] for one in self._starts], axis=0)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """`means` of starts drawn with replacement, each with its observations drawn
        so: the same ones in all cells that have as many."""
        found = []
        for start in rng.integers(len(self._starts), size=len(self._starts)):
            values, places = self._starts[start], {}
            for count in sorted({len(v) for v in values}):
                places[count] = rng.integers(count, size=count)
            found.append([v[places[len(v)]].mean() for v in values])
        return np.mean(found, axis=0)

    def rows(self, means: np.ndarray, drawn: np.ndarray | None = None) -> Rows:
        """Rows with these means; with an interval where draws are given."""
        rows = Rows(self._study.frames)
        cells: dict[tuple[str, int], dict[str, Any]] = {}
        for place, (name, number, measure) in enumerate(self._places):
            within = self._first[name][number]["within"].get(measure, 0.0)
            value, width = float(means[place]), within
            if drawn is not None:
                low, high = np.percentile(drawn[:, place], (2.5, 97.5))
                width = max(width, float(high - low) / 2)
            cell: Any = value
            if drawn is not None or within:
                cell = Estimate(value, len(self._starts), width, INTERVAL)
            cells.setdefault((name, number), {})[measure] = cell
        for name, found in self._keys.items():
            for number, keys in enumerate(found):
                rows(name, *keys, **cells.get((name, number), {}))
        return rows


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
