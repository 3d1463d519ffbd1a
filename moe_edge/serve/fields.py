"""JSON bodies, read strictly: every field known, of its type and within its bounds."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from moe_edge.core.json_reader import parse_json
from moe_edge.serve.errors import ApiError, bad_value, shown

MAX_DEPTH = 64  # of nested lists and objects, for JSON schemas; other fields have 4

Reader = Callable[[str, Any], Any]  # (name, value) -> value, or raises ApiError


def read_object(body: bytes) -> dict[str, Any]:
    """The object of a body.

    Raises:
      ApiError: invalid_json: not UTF-8, not JSON, no object, a name that occurs twice,
        a number that is none or that no float holds, half a character, or lists in
        lists beyond `MAX_DEPTH`.
    """
    value = parse_json("the body", body, _invalid, max_depth=MAX_DEPTH)
    if not isinstance(value, dict):
        raise _invalid(f"the body is {_kind(value)}, expected an object")
    return value


def read_fields(
    given: Mapping[str, Any],
    readers: Mapping[str, Reader],
    neutral: Mapping[str, Any] | None = None,
    ignored: Collection[str] = (),
    within: str = "",
) -> dict[str, Any]:
    """Values of the fields that were given; null stands for a field left out.

    Args:
      given: the object.
      readers: field -> what checks it.
      neutral: field that is not supported -> the API's default, which changes nothing.
      ignored: fields that may hold anything.
      within: path of the object, for messages, such as `messages[0].`.
    Raises:
      ApiError: unknown_parameter, unsupported_parameter, or what a reader raises.
    """
    neutral, values = neutral or {}, {}
    for name, value in given.items():
        path = f"{within}{name}"
        if name in readers:
            if value is not None:
                values[name] = readers[name](path, value)
        elif name in neutral:
            if value is not None and not _same(value, neutral[name]):
                raise ApiError(
                    "unsupported_parameter",
                    f"{path} is not supported: got {shown(value)}, expected "
                    f"{json.dumps(neutral[name])} or none; leave it out",
                    param=path,
                )
        elif name not in ignored:
            path = f"{within}{shown(name)[1:-1]}"
            raise ApiError(
                "unknown_parameter",
                f"unknown parameter {path}; leave it out",
                param=path,
            )
    return values


def invalid(name: str, value: Any, expected: str) -> ApiError:
    """The error of a field with a wrong value."""
    return bad_value(name, f"{name} is {shown(value)}, expected {expected}")


# Readers.


def whole(low: int, high: int) -> Reader:
    """A whole number in low..high."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            if low <= value <= high:
                return value
        raise invalid(name, value, f"a whole number in {low}..{high}")

    return read


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """A number in low..high; `above`: not low itself."""

    def read(name: str, value: Any) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if low <= value <= high and not (above and value == low):
                return float(value)
        start = f"more than {low:g} and at most" if above else f"from {low:g} to"
        raise invalid(name, value, f"a number {start} {high:g}")

    return read


def flag(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise invalid(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    """A string, which may be empty."""
    if not isinstance(value, str):
        raise invalid(name, value, "a string")
    return value


def some_text(name: str, value: Any) -> str:
    """A string that is not empty."""
    if not text(name, value):
        raise invalid(name, value, "some text")
    return value


def one_of(*known: Any) -> Reader:
    """One of some values."""

    def read(name: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in known:
            raise invalid(name, value, f"one of {', '.join(known)}")
        return value

    return read


def token_ids(vocab_size: int) -> Reader:
    """Ids of tokens, possibly none."""

    def read(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise invalid(name, value, "a list of token ids")
        # All at once, for a long prompt should be read fast; true is no id.
        if set(map(type, value)) <= {int}:
            if not value or 0 <= min(value) <= max(value) < vocab_size:
                return tuple(value)
        fits = (type(i) is int and 0 <= i < vocab_size for i in value)
        bad = next(i for i, fit in zip(value, fits, strict=True) if not fit)
        raise invalid(name, bad, f"token ids in 0..{vocab_size - 1}")

    return read


# JSON.


def _invalid(fault: str) -> ApiError:
    return ApiError("invalid_json", fault[:300])


def _same(value: Any, default: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {str: "a string", list: "a list"}.get(type(value), "a number")
