"""Whether an entry repeats from day to day: its last day's starts beside those before.

`python -m moe_edge.bench.days results/NAME ...` makes of each side's starts the entry
that they alone would be, and compares the two as `metrics/again.py` compares entries:
it exits with 1 if one does not repeat. `--table` prints a row of Markdown for each of
the entries that has starts of two days.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.bench.joined import derived, join
from moe_edge.bench.registry import find
from moe_edge.bench.starts import facts_of, used
from moe_edge.bench.starts_file import FILE, Start, read_tries
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.again import Found, compare, relative, report
from moe_edge.metrics.repeated import Value
from moe_edge.metrics.schema import read_result

LEAST = 2  # starts of a side: values of one have no bounds
TIMES = ("s", "ms", "us")
KINDS = ("times", "others", "derived")  # of values
HEAD = """\
| entry | starts | times | others | derived | times by | others by | repeats |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


class Days(NamedTuple):
    """An entry and its kept starts.

    Attributes:
      name: of its folder.
      result: its result.json.
      starts: by day (UTC), in order.
    """

    name: str
    study: Study
    result: Mapping[str, Any]
    starts: Mapping[str, Sequence[Start]]

    @property
    def sides(self) -> tuple[list[Start], list[Start]]:
        """Those of all days but the last, and those of the last."""
        *before, last = self.starts.values()
        return list(itertools.chain(*before)), list(last)

    @property
    def short(self) -> str | None:
        """The side with too few starts, of two days, if there is one."""
        *before, last = self.starts
        for side, days in zip(self.sides, (before, [last]), strict=True):
            if len(side) < LEAST:
                return f"{len(side)} start of {', '.join(days)}"
        return None


def read_days(folder: str | Path) -> Days:
    """An entry by its days.

    Raises:
      ConfigError: it has no starts or damaged ones, or its study is not known.
    """
    folder = Path(folder)
    result = read_result(folder)
    if "starts" not in result or not (folder / FILE).is_file():
        raise ConfigError(
            f"{folder} keeps no starts, which only --starts measures; measure it again "
            "and compare by python -m moe_edge.metrics.again"
        )
    study, by_day = find(result["study"]), dict[str, list[Start]]()
    for start in used(read_tries(folder, study)):
        by_day.setdefault(start["started_utc"][:10], []).append(start)
    return Days(folder.resolve().name, study, result, dict(sorted(by_day.items())))


def compare_days(days: Days) -> Found:
    """The entry that the last day's starts alone would be, beside that of the others.

    Raises:
      ConfigError: starts of one day alone, too few on a side, or some that cannot be
        joined.
    """
    if len(days.starts) < 2:
        known = "".join(days.starts) or "no day"
        raise ConfigError(
            f"{days.name} has starts of {known} alone; measure more on another day, by "
            "--starts 2 --append"
        )
    if days.short:
        raise ConfigError(
            f"{days.name} has {days.short}, expected {LEAST} or more on either side; "
            "measure more with --append"
        )
    before, last = (entry_of(days, starts) for starts in days.sides)
    return compare(before, last)


def entry_of(days: Days, starts: Sequence[Start]) -> dict[str, Any]:
    """The result.json of some of the starts."""
    joined = join(days.study, starts)
    said = {"each": facts_of(starts), "intervals": joined.intervals}
    numbers = derived(days.study, joined.rows)
    frames = joined.rows.stored()
    return {**days.result, "frames": frames, "numbers": numbers, "starts": said}


def told(days: Days) -> list[str]:
    """How many starts each day has, and by which code, where that differs."""
    counts = [f"{len(starts)} of {day}" for day, starts in days.starts.items()]
    lines = [f"{days.name}: starts, {', '.join(counts)}"]
    before, last = (
        ", ".join(dict.fromkeys(str(start.get("commit"))[:8] for start in side))
        for side in days.sides
    )
    if before != last:
        lines.append(f"note: of commit {before}, again {last}")
    return lines


def kind_of(value: Value) -> str:
    """Column of the table, by what a measure's unit says; what is derived has none."""
    if value.unit is None:
        return "derived"
    return "times" if value.unit in TIMES or value.unit.endswith("/s") else "others"


def counts_of(found: Found) -> dict[str, tuple[int, ...]]:
    """Values within and outside, by their kind."""
    sides = [
        [kind_of(mine) for mine, _ in pairs.values()]
        for pairs in (found.within, found.outside)
    ]
    return {kind: tuple(side.count(kind) for side in sides) for kind in KINDS}


def typical(found: Found, kind: str) -> str:
    """The median difference of the values of a kind, as a share of the larger one."""
    pairs = [*found.within.values(), *found.outside.values()]
    shares = [relative(*pair) for pair in pairs if kind_of(pair[0]) == kind]
    return f"{statistics.median(shares):.0%}" if shares else "-"


def apart(found: Found) -> str:
    """By how much the times that lie outside differ."""
    pairs = [p for p in found.outside.values() if kind_of(p[0]) == "times"]
    changes = [its.value / mine.value - 1 for mine, its in pairs if mine.value]
    if not changes:
        return "no time outside"
    return f"times outside {min(changes):+.0%} to {max(changes):+.0%}"


def table(entries: Iterable[Days]) -> Iterator[str]:
    """Rows of Markdown: of each entry, values that differ within / outside of what the
    bounds allow, by how much in the median, and whether it repeats; the last one adds
    them up."""
    yield HEAD
    verdicts, sums = [], dict.fromkeys(KINDS, (0, 0))
    for days in entries:
        name, starts = f"`{days.name}`", " / ".join(str(len(s)) for s in days.sides)
        if days.short:
            yield f"| {name} | {starts} | | | | | | not judged: {days.short} |"
            continue
        found = compare_days(days)
        counts, faults = counts_of(found), found.faults()
        differ = [typical(found, kind) for kind in ("times", "others")]
        verdicts.append(not faults)
        sums = {
            kind: (sums[kind][0] + i, sums[kind][1] + o)
            for kind, (i, o) in counts.items()
        }
        said = f"no: {'; '.join(faults)}, {apart(found)}" if faults else "yes"
        yield _row(name, starts, counts, *differ, said)
    yield _row("all", "", sums, "", "", f"{sum(verdicts)} of {len(verdicts)}")


def _row(
    name: str, starts: str, counts: Mapping[str, Sequence[int]], *said: str
) -> str:
    cells = [f"{within} / {outside}" for within, outside in counts.values()]
    return f"| {' | '.join([name, starts, *cells, *said])} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares the days of the entries of a command line; 1 if one does not repeat."""
    parser = argparse.ArgumentParser(prog="python -m moe_edge.bench.days")
    parser.add_argument("entry", nargs="+", help="folder of a results entry")
    parser.add_argument(
        "--table",
        action="store_true",
        help="print rows of Markdown; what has no starts of two days is left out",
    )
    given = parser.parse_args(arguments)
    try:
        if given.table:
            if missing := [one for one in given.entry if not Path(one).exists()]:
                raise ConfigError(f"{missing[0]} does not exist; check the path")
            folders = [one for one in given.entry if Path(one, FILE).is_file()]
            entries = sorted(map(read_days, folders), key=lambda days: days.name)
            for line in table(one for one in entries if len(one.starts) > 1):
                print(line, flush=True)
            return 0
        failed = False
        for days in [read_days(folder) for folder in given.entry]:
            found = compare_days(days)
            print("\n".join([*told(days), *report(found)]))
            failed |= bool(found.faults())
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
