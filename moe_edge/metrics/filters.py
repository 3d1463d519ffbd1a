"""Filters of a page's template: what it picks from rows, and says of them."""

from collections.abc import Iterable, Mapping
from typing import Any

from moe_edge.metrics.frames import HIGH, LOW
from moe_edge.metrics.ranged import NO_DIFFERENCE, Ranged, Words, formatted

Line = Mapping[str, Any]
WORDS = Words()


def where(rows: Iterable[Line], **keys: Any) -> list[Line]:
    """Rows whose keys have these values."""
    return [row for row in rows if all(row[k] == value for k, value in keys.items())]


def alike(rows: Iterable[Line], measure: str) -> list[Line]:
    """Rows whose ratio to the best is no difference; the best, at 1, is left out."""
    return [
        row
        for row in rows
        if row[measure] != 1 and formatted(row[measure], "x.3g") == NO_DIFFERENCE
    ]


def one(rows: Iterable[Line], **keys: Any) -> Line:
    """The row whose keys have these values."""
    (found,) = where(rows, **keys)
    return found


def say(rows: Iterable[Line], form: str, between: str = ", ") -> str:
    """Every row in a few words, such as `{policy} {change:+.0%}`."""
    return between.join(WORDS.vformat(form, (), row) for row in rows)


def ranged(rows: Iterable[Line], measure: str, of: str = "") -> list[Line]:
    """Rows whose measure has an interval, by which it is a difference or none.

    Args:
      of: the measure whose bounds it has, where that differs by a constant.
    """
    found = []
    for row in rows:
        value = row[measure]
        if not isinstance(value, Ranged):
            beside = value - row[of] if of else 0.0
            value = Ranged(value, *(b + beside for b in bounds_of(row, of or measure)))
        found.append({**row, measure: value})
    return found


def bounds_of(row: Line, measure: str) -> tuple[float, float]:
    """Low and high of a measure; a plain number's are itself."""
    return tuple(row.get(measure + end, row[measure]) for end in (LOW, HIGH))


def level(rows: Iterable[Line], best: Line, measure: str) -> list[Line]:
    """The other rows that cannot be told from the best: the bounds of both overlap."""
    low, high = bounds_of(best, measure)
    return [
        row
        for row in rows
        if row[measure] != best[measure]
        and bounds_of(row, measure)[0] <= high
        and bounds_of(row, measure)[1] >= low
    ]


def span(values: Iterable[float], form: str = ".3g", unit: str = "") -> str:
    """The least and the largest, such as `3.7-4.7`; one where they look alike."""
    values = list(values)
    low, high = (formatted(value, form) for value in (min(values), max(values)))
    return (low if low == high else f"{low} to {high}") + unit
