"""Numbers with an interval: a change inside of it is told as "no difference"."""

import string
from collections.abc import Collection, Iterator, Mapping
from typing import Any

NO_DIFFERENCE = "no difference"
Path = tuple[str | int, ...]


class Ranged(float):
    """A number and its 95 % interval.

    A format with a sign, such as `+.1%`, tells a change: it is no difference where the
    interval holds 0. Ratios: `formatted`.
    """

    low: float
    high: float

    def __new__(cls, value: float, low: float, high: float) -> "Ranged":
        self = super().__new__(cls, value)
        self.low, self.high = low, high
        return self

    def __format__(self, form: str) -> str:
        if form.startswith("+") and self.low <= 0 <= self.high:
            return NO_DIFFERENCE
        return super().__format__(form)

    def __mul__(self, factor: float) -> "Ranged":
        low, high = sorted((self.low * factor, self.high * factor))
        return Ranged(float(self) * factor, low, high)

    __rmul__ = __mul__

    def __sub__(self, other: float) -> "Ranged":
        """Less a number that has no interval."""
        number = float(other)
        return Ranged(float(self) - number, self.low - number, self.high - number)


def formatted(value: Any, form: str) -> str:
    """A value in a format, which may begin with `x`: so `x.2f` tells a ratio, which is
    no difference where its interval holds 1."""
    if not form.startswith("x"):
        return format(value, form)
    if isinstance(value, Ranged) and value.low <= 1 <= value.high:
        return NO_DIFFERENCE
    return format(value, form[1:])


class Words(string.Formatter):
    """`str.format` by `formatted`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return formatted(value, format_spec)


def leaves(
    value: Any, path: Path = (), skip: Collection[Path] = ()
) -> Iterator[tuple[Path, float]]:
    """Numbers in nested dicts and lists, by their paths.

    Args:
      skip: paths below which nothing is looked at.
    """
    if path in skip:
        return
    if isinstance(value, (Mapping, list)):
        for key, item in _items(value):
            yield from leaves(item, (*path, key), skip)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def unlike(value: Any, other: Any, path: Path = ()) -> set[Path]:
    """Paths below which two nested values differ in more than numbers: a list or dict
    of another size, or with another text."""
    if isinstance(value, (Mapping, list)) and type(value) is type(other):
        mine, its = dict(_items(value)), dict(_items(other))
        texts = [key for key in mine if isinstance(mine[key], str)]
        if mine.keys() != its.keys() or any(mine[k] != its[k] for k in texts):
            return {path}
        parts = [unlike(mine[key], its[key], (*path, key)) for key in mine]
        return set().union(*parts)
    return {path} if isinstance(value, (Mapping, list)) else set()


def with_intervals(value: Any, intervals: Mapping[str, Any], path: Path = ()) -> Any:
    """The value with a `Ranged` in place of each number that has an interval.

    Args:
      intervals: path, joined by slashes -> [low, high] or None.
    """
    if isinstance(value, (Mapping, list)):
        found = {
            key: with_intervals(item, intervals, (*path, key))
            for key, item in _items(value)
        }
        return found if isinstance(value, Mapping) else list(found.values())
    bounds = intervals.get("/".join(map(str, path)))
    if bounds is None or (isinstance(value, int) and bounds[0] == bounds[1]):
        return value  # a whole number that all starts have, such as a batch size
    return Ranged(value, *bounds)


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, Mapping) else enumerate(value)
