"""The one reader of JSON: of files, of JSON lines and of messages.

What cannot be read is refused in one line: where, what is wrong, and at which place.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import decode_utf8

MAX_DEPTH = 100  # of nested lists and objects; what is written here has fewer than 10
MAX_FILE_BYTES = 16 << 20
LARGE_FILE_BYTES = 256 << 20  # of a run's requests, or a table of all neurons

Refusal = Callable[[str], Exception]  # message -> what is raised

_NESTS = frozenset((dict, list))
_TOO_LONG = re.compile(r"[0-9]{309}")  # no float holds such a whole number
# Every 30th character of a text: it has ten digits in a row where it is too long.
_SOME = 30
_MAY_BE_TOO_LONG = re.compile(r"[0-9]{10}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _Fault(ValueError):
    """What is wrong with a text that `json` would accept."""


def parse_json(
    where: str | Path,
    content: str | bytes,
    error: Refusal = ConfigError,
    *,
    strict: bool = True,
    max_depth: int | None = MAX_DEPTH,
) -> Any:
    """The value of a JSON text.

    Args:
      where: the text is from, for the message: a path, `FILE:LINE`, `the body`.
      error: what to raise, given the message.
      strict: also refuse what Python's `json` writes although it is no JSON: NaN,
        Infinity, and half a character, as in file names that are not UTF-8. Hugging
        Face configs and what our processes write for each other may hold them.
      max_depth: of nested lists and objects; None: another reader has checked it.
    Raises:
      `error`: not UTF-8, not JSON, nested too deeply, a name twice in an object, or a
        number with too many digits.
    """
    text = decode_utf8(where, content, error) if isinstance(content, bytes) else content
    hooks = {"parse_constant": _refuse_constant, "parse_float": _finite}
    try:
        value = json.loads(
            text, object_pairs_hook=_distinct, **(hooks if strict else {})
        )
        if max_depth is not None:
            _check_depth(value, max_depth)
        may_be_too_long = _MAY_BE_TOO_LONG.search(text[::_SOME])
        if may_be_too_long and _TOO_LONG.search(text):  # perhaps only within a text
            json.loads(text, parse_int=_short)
        if strict and _SURROGATE.search(text):
            _check_characters(value)
        return value
    except json.JSONDecodeError as fault:
        line = f"line {fault.lineno}, " if "\n" in text.strip() else ""
        reason = f"{fault.msg} at {line}column {fault.colno}"
    except RecursionError:
        reason = _too_deep(max_depth or MAX_DEPTH)
    except _Fault as fault:
        reason = str(fault)
    except ValueError:  # beyond a float, or what Python reads at all
        reason = "a number has too many digits"
    raise error(f"{where} is not valid JSON: {reason}")


def read_json(
    path: str | Path,
    error: Refusal = ConfigError,
    *,
    strict: bool = True,
    max_bytes: int = MAX_FILE_BYTES,
) -> Any:
    """The value of a JSON file; see `parse_json`.

    Raises:
      `error`: also for a file that cannot be read, or has more than `max_bytes`.
    """
    with _opened(Path(path), error) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        size = Path(path).stat().st_size
        raise error(f"{path} has {size} bytes, expected at most {max_bytes}")
    return parse_json(path, content, error, strict=strict)


def text_lines(
    path: str | Path, error: Refusal = ConfigError
) -> Iterator[tuple[str, str]]:
    """Yields ("FILE:LINE", line) of a text file; blank lines are skipped.

    Raises:
      `error`: the file cannot be read, or is not UTF-8.
    """
    begin = 0
    with _opened(Path(path), error) as file:
        for number, raw in enumerate(file, 1):
            where, first, begin = f"{path}:{number}", begin, begin + len(raw)
            if raw.strip():
                yield where, decode_utf8(where, raw, error, first).rstrip()


def json_lines(
    path: str | Path, error: Refusal = ConfigError, *, strict: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yields ("FILE:LINE", value) of a JSON-lines file; blank lines are skipped.

    Raises:
      `error`: see `parse_json` and `text_lines`.
    """
    for where, line in text_lines(path, error):
        yield where, parse_json(where, line, error, strict=strict)


def json_objects(
    path: str | Path, error: Refusal = ConfigError, *, strict: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """As `json_lines`, of files that have an object in each line.

    Raises:
      `error`: also for a line that is no object.
    """
    for where, value in json_lines(path, error, strict=strict):
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise error(f"{where} is a JSON {kind}, expected an object {{...}}")
        yield where, value


def as_read_back(value: Any, **options) -> Any:
    """A value as it is once it was written and read: tuples are lists, keys texts.

    Args:
      options: of `json.dumps`.
    """
    return json.loads(json.dumps(value, **options))


def _opened(path: Path, error: Refusal):
    """A file to read; `error` instead of OSError."""
    if path.is_dir():
        raise error(f"{path} is a folder, expected a JSON file")
    try:
        return path.open("rb")
    except OSError as fault:
        raise error(f"cannot read {path}: {fault.strerror}") from fault


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a name that occurs twice `json` would take the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _Fault(f"{twice[:60]!r} occurs twice in an object; leave one of them")
    return found


def _refuse_constant(name: str) -> float:
    raise _Fault(f"{name} is no JSON number; expected a finite one")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Fault(f"the number {text[:60]} is too large")
    return value


def _short(text: str) -> int:
    if _TOO_LONG.search(text):
        raise ValueError(text)
    return int(text)


def _check_depth(value: Any, most: int) -> None:
    level = [value] if type(value) in _NESTS else []
    for _ in range(most):
        if not level:
            return
        # Types are compared first: a long list of numbers is passed fast.
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        inner = [v for v in inner if not _NESTS.isdisjoint(map(type, v))]
        level = [x for v in inner for x in v if type(x) in _NESTS]
    if level:
        raise _Fault(_too_deep(most))


def _too_deep(most: int) -> str:
    return f"lists and objects are nested deeper than {most}"


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as fault:
        raise _Fault(
            f"a text holds half a character, \\u{ord(fault.object[fault.start]):04x}; "
            "expected whole ones"
        ) from fault
