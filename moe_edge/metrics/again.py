"""An entry beside one that was measured again, value by value.

`python -m moe_edge.metrics.again results/NAME DIR` says whether the entry in DIR
repeats the other: how many values are equal, how many differ by less than the bounds
of both let them, and which do not. It exits with 1 if they do not repeat.
"""

import argparse
import collections
import dataclasses
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.conditions import other_conditions, other_settings
from moe_edge.metrics.frames import HIGH, LOW, N
from moe_edge.metrics.ranged import leaves, unlike
from moe_edge.metrics.repeated import MANY, Value, difference_allowed, most_outside
from moe_edge.metrics.schema import ROWS_VERSION, read_result

CLOSE = 1e-9  # of a value: what another processor's sums may differ by
SHOWN = 20  # values that are named


@dataclasses.dataclass
class Found:
    """What two entries have in common.

    Attributes:
      equal: values that are equal.
      within: that differ by less than their bounds let them, by name.
      outside: that differ by more, by name.
      loose: that differ and have no bounds, by name.
      lacking: rows and numbers of the entry that the second one lacks.
      added: those of the second one that the entry lacks.
      told: texts that runs found for themselves, such as who was fastest, and that
        differ.
      is_computed: whether values without bounds must be equal.
    """

    is_computed: bool
    equal: int = 0
    within: dict[str, tuple[Value, Value]] = dataclasses.field(default_factory=dict)
    outside: dict[str, tuple[Value, Value]] = dataclasses.field(default_factory=dict)
    loose: dict[str, tuple[Value, Value]] = dataclasses.field(default_factory=dict)
    lacking: list[str] = dataclasses.field(default_factory=list)
    added: list[str] = dataclasses.field(default_factory=list)
    told: list[str] = dataclasses.field(default_factory=list)

    def faults(self) -> list[str]:
        """Why they do not repeat; empty if they do."""
        bounded = len(self.within) + len(self.outside)
        found = []
        if len(self.outside) > most_outside(bounded):
            found.append(f"{len(self.outside)} of {bounded} values lie outside")
        if self.lacking:
            found.append(f"{len(self.lacking)} rows or numbers are lacking")
        if self.is_computed and self.loose:
            found.append(f"{len(self.loose)} computed values differ")
        elif self.loose and not bounded:
            found.append(f"none of {len(self.loose)} that differ has bounds")
        return found

    def add(self, name: str, mine: Value, its: Value) -> None:
        """Judges a pair."""
        if math.isclose(mine.value, its.value, rel_tol=CLOSE, abs_tol=1e-12):
            self.equal += 1
            return
        low, high = sorted((mine, its), key=lambda one: one.value)
        allowed = difference_allowed(low, high)
        if math.isnan(allowed):  # one of them has no bounds
            self.loose[name] = mine, its
        elif high.value - low.value <= allowed:
            self.within[name] = mine, its
        else:
            self.outside[name] = mine, its


def compare(mine: Mapping[str, Any], its: Mapping[str, Any]) -> Found:
    """Two results entries, read, of one study.

    Raises:
      ConfigError: they are of different studies, schemas or kinds.
    """
    for key in ("schema_version", "study", "question", "kind"):
        if mine.get(key) != its.get(key):
            raise ConfigError(
                f"{key} is {mine.get(key)!r} in one entry and {its.get(key)!r} in the "
                "other; give two entries of one study"
            )
    # Starts have seeds of their own: what they compute differs, too.
    found = Found(mine["kind"] == "simulated" and "starts" not in mine)
    if mine["schema_version"] != ROWS_VERSION:
        _add_all(found, "", _metrics(mine), _metrics(its))
        return found
    frames, others = mine["frames"], its["frames"]
    for name in frames.keys() & others.keys():
        _add_frame(found, name, frames[name], others[name])
    found.lacking += [f"frame {name}" for name in frames.keys() - others.keys()]
    found.added += [f"frame {name}" for name in others.keys() - frames.keys()]
    skip = unlike(mine["numbers"], its["numbers"])
    found.told += sorted(_name("numbers", *path) for path in skip)
    _add_all(found, "numbers/", _numbers(mine, skip), _numbers(its, skip))
    return found


def _add_all(
    found: Found, prefix: str, mine: Mapping[str, Value], its: Mapping[str, Value]
) -> None:
    for name in mine.keys() & its.keys():
        found.add(prefix + name, mine[name], its[name])
    found.lacking += [prefix + name for name in sorted(mine.keys() - its.keys())]
    found.added += [prefix + name for name in sorted(its.keys() - mine.keys())]


def _metrics(result: Mapping[str, Any]) -> dict[str, Value]:
    """Values of an entry without frames, by what ran and what was measured."""
    found = {}
    for row in result["metrics"]:
        value, spread = row["value"], row["spread"]
        bounds = (value - spread["value"], value + spread["value"])
        known = (*bounds, row["n"]) if _is_bound(spread["kind"]) else ()
        found[f"{row['policy']}: {row['name']}"] = Value(value, *known)
    return found


def _name(*path: str | int) -> str:
    return "/".join(map(str, path))


def _is_bound(kind: str) -> bool:
    """Whether a spread says how far a second run may be; one over experts does not."""
    return "interval" in kind or "range" in kind


def _numbers(
    result: Mapping[str, Any], skip: Collection[tuple[str | int, ...]]
) -> dict[str, Value]:
    """What is derived, by path, with the bounds that starts or rows gave it."""
    started = result.get("starts", {"each": [], "intervals": {}})
    known = started["intervals"]
    starts = sum(start["used"] for start in started["each"])
    numbers = leaves(result["numbers"], skip=skip)
    every = {_name(*path): value for path, value in numbers}
    found = {}
    for name, value in every.items():
        if _is_bound_in(every, name):
            continue
        ends = every.get(name + LOW), every.get(name + HIGH)
        if name in known:
            found[name] = Value(value, *known[name], starts)
        elif None not in ends:
            found[name] = Value(value, *ends, int(every.get(name + N, MANY)))
        else:
            found[name] = Value(value)
    return found


def _is_bound_in(names: Collection[str], name: str) -> bool:
    """Whether it is an end of another number, or what that is of: one of three, such as
    `tpot_ms_low`, or `tpot_ms_low_replay` in a table that was joined with another."""
    for end in (N, LOW, HIGH):
        before, found, after = name.rpartition(end)
        if found and (not after or after.startswith("_")):
            if all(before + one + after in names for one in ("", N, LOW, HIGH)):
                return True
    return False


def _add_frame(
    found: Found, name: str, mine: Mapping[str, Any], its: Mapping[str, Any]
) -> None:
    """Compares the rows of a frame that have the same keys."""
    if mine["keys"] != its["keys"]:
        found.lacking.append(f"frame {name}, whose keys differ")
        return
    columns = _columns_to_match(mine, its)
    for place in range(len(mine["keys"])):
        if place not in columns:
            found.told.append(f"{name}: {mine['keys'][place]}")
    _add_all(
        found,
        f"{name}: ",
        dict(_cells(mine, columns)),
        dict(_cells(its, columns)),
    )


def _columns_to_match(mine: Mapping[str, Any], its: Mapping[str, Any]) -> list[int]:
    """Columns that say which row is which: all keys, or all but one that holds texts
    which runs found for themselves."""
    every = list(range(len(mine["keys"])))
    for columns in (every, *([c for c in every if c != out] for out in every)):
        if _keys(mine, columns) == _keys(its, columns):
            return columns
    return every


def _keys(stored: Mapping[str, Any], columns: Sequence[int]) -> collections.Counter:
    return collections.Counter(
        tuple(row[column] for column in columns) for row in stored["rows"]
    )


def _cells(
    stored: Mapping[str, Any], columns: Sequence[int]
) -> Iterator[tuple[str, Value]]:
    """Values by row and measure; rows with the same keys are told apart by their
    order."""
    seen: collections.Counter = collections.Counter()
    for row in stored["rows"]:
        keys = tuple(row[column] for column in columns)
        seen[keys] += 1
        text = ", ".join(map(str, keys)) + f" #{seen[keys]}" * (seen[keys] > 1)
        units, cells = stored["units"], row[len(stored["keys"]) :]
        for (measure, unit), cell in zip(units.items(), cells, strict=True):
            if isinstance(cell, list):
                value, n, low, high = cell
                bounds = (low, high, n) if _is_bound(stored["bounds"][measure]) else ()
                yield f"{text}: {measure}", Value(value, *bounds, unit=unit)
            elif cell is not None:
                yield f"{text}: {measure}", Value(cell, unit=unit)


def report(found: Found) -> list[str]:
    """What a comparison says, in lines; the last one is the judgement."""
    counts = [
        f"{found.equal} values equal",
        f"{len(found.within)} differ by less than their bounds let them",
        f"{len(found.outside)} by more",
        f"{len(found.loose)} without bounds differ",
    ]
    lines = [", ".join(counts)]
    for kind, pairs in (("outside", found.outside), ("no bounds", found.loose)):
        far = sorted(pairs, key=lambda name: -relative(*pairs[name]))
        lines += [
            f"  {kind}: {name}: {pairs[name][0]}, again {pairs[name][1]}"
            for name in far[:SHOWN]
        ]
        lines += [f"  {kind}: {len(far) - SHOWN} more"] * (len(far) > SHOWN)
    lines += [f"  lacking: {name}" for name in found.lacking[:SHOWN]]
    lines += [f"  {len(found.added)} rows or numbers are new"] * bool(found.added)
    lines += [f"  other texts in {name}" for name in found.told]
    if faults := found.faults():
        return [*lines, f"does not repeat: {'; '.join(faults)}"]
    aside = f", {len(found.loose)} values without bounds aside" * bool(found.loose)
    return [*lines, f"repeats{aside}"]


def relative(mine: Value, its: Value) -> float:
    """The difference of two values, of which one is not 0, over the larger one."""
    return abs(mine.value - its.value) / max(abs(mine.value), abs(its.value))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares the entries of a command line; 1 if they do not repeat."""
    parser = argparse.ArgumentParser(prog="python -m moe_edge.metrics.again")
    parser.add_argument("entry", help="folder of a results entry")
    parser.add_argument("again", help="folder of the entry that was measured again")
    given = parser.parse_args(arguments)
    try:
        mine, its = read_result(given.entry), read_result(given.again)
        found = compare(mine, its)
        others = other_settings(given.entry, given.again)
        conditions = other_conditions(mine, its)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    if others:
        print(f"note: settings that only one entry names: {', '.join(others)}")
    if conditions:
        print(f"note: {'; '.join(conditions)}")
    print("\n".join(report(found)))
    return int(bool(found.faults()))


if __name__ == "__main__":
    sys.exit(main())
