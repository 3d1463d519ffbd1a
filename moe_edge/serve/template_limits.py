"""What a template may compute: limits of its texts and of its time.

Every step that makes a text is counted before it makes one: `spend`. Every step that
repeats others looks at the time: `check_time`. Nothing here knows jinja2;
`template_sandbox.py` calls it.
"""

import collections
import contextlib
import contextvars
import re
import string
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

MOST_CHARACTERS = 4 << 20  # of a text: four times the largest body by default
MOST_WORK = 1024 * MOST_CHARACTERS  # of all texts made on the way, kept or not
ITEM = 32  # characters that an item of a list counts as in all steps together
MOST_TURNS = 100_000  # of all `range` of one rendering
MOST_SECONDS = 5.0  # of this thread on a CPU, so that other work does not count
MOST_INDENT = 100
_SPENT: contextvars.ContextVar[collections.Counter] = contextvars.ContextVar("spent")


class TooMuch(Exception):
    """A template that would go on for ever, or fill the memory."""


@contextlib.contextmanager
def limits():
    """One rendering, or a few, whose steps are counted together."""
    token = _SPENT.set(collections.Counter(began_s=time.thread_time()))
    try:
        yield
    finally:
        _SPENT.reset(token)


def spend(characters: int, weight: int = 1) -> None:
    """Counts a text before it is made, or with `ITEM` as the weight, a list."""
    if characters > MOST_CHARACTERS:
        raise TooMuch(f"a text of more than {MOST_CHARACTERS} characters")
    spent = _SPENT.get(None)  # None: jinja2 computes a constant
    if spent is not None:
        spent["characters"] += max(characters, 0) * weight
        if spent["characters"] > MOST_WORK:
            raise TooMuch(f"more than {MOST_WORK} characters in all steps together")
    check_time()


def check_time() -> None:
    """Ends a rendering that takes too long."""
    spent = _SPENT.get(None)
    if spent is not None and time.thread_time() - spent["began_s"] > MOST_SECONDS:
        raise TooMuch(f"more than {MOST_SECONDS:g} s of computing")


def timed(values: Iterable) -> Iterator:
    """The values of a loop, with a look at the time before each."""
    for value in values:
        check_time()
        yield value


def count_turns(turns: int) -> None:
    """Counts a `range`."""
    spent = _SPENT.get(collections.Counter())
    spent["turns"] += turns
    if spent["turns"] > MOST_TURNS:
        raise TooMuch(f"more than {MOST_TURNS} turns of its loops")


def text_size(*values: Any) -> int:
    """About the characters of values as text, without making it."""
    size, todo = 0, list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, int):
            size += 1 + value.bit_length() // 3
        elif isinstance(value, range):
            size += 8 * len(value)
        elif isinstance(value, Collection):
            size += 2 + 2 * len(value)
            if size <= MOST_CHARACTERS:
                todo += value.values() if isinstance(value, Mapping) else ()
                todo += value
        else:
            size += 32
        if size > MOST_CHARACTERS:
            break
    return size


# By how many characters the result of a filter or method may be longer than its
# arguments, which the functions below take, too: the text comes first.


def _indented(text, width=4, first=False, blank=False):
    size = width if isinstance(width, int) else len(width)
    return size * (1 + len(str(text).splitlines()))


def _replaced(text, old, new, count=None):
    if not isinstance(text, bytes):
        text, old, new = str(text), str(old), str(new)
    return text.count(old) * len(new)


def _joined(values, d="", attribute=None):
    return len(values) * text_size(d)


def _rounded(value, precision=0, method="common"):
    if abs(precision) > MOST_INDENT:
        raise TooMuch(f"a number of {precision} digits")
    return abs(precision)


def _summed(values, attribute=None, start=0):
    if isinstance(start, int | float):
        return 0
    if attribute is not None:
        raise TooMuch("a sum of attributes that are no numbers")
    return len(values) * text_size(values)  # every step copies all before


def _wrapped(text, width=79, break_long_words=True, wrapstring=None, *_, **__):
    longest = max(map(len, str(text).split()), default=0)
    # Python copies what is left of a word for every piece of it.
    if longest**2 > MOST_WORK * max(width, 1):
        raise TooMuch(f"a word of {longest} characters to wrap by {width}")
    return 0 if wrapstring is None else len(str(text)) * len(wrapstring)


def _linked(text, *given, **named):
    return len(str(text)) * (16 + text_size(*given, *named.values()))


_SPEC = re.compile(r"%(?:\((.*?)\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?", re.DOTALL)


def percent_size(text, *given, **named):
    """Of `%`: what its widths ask for, and what names that occur again repeat."""
    text = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    found = _SPEC.findall(text)
    widths = [width for _, *both in found for width in both if width]
    return _formatted([name for name, *_ in found], widths, given, named)


def _braces(text, *given, **named):
    """Of `format`, alike."""
    names, widths = [], []
    for _, field, spec, _ in string.Formatter().parse(text):
        names.append(re.split(r"[.\[]", field or "")[0])
        widths += re.findall(r"\d+|\{", spec or "")
    return _formatted(names, widths, given, named)


def _formatted(names, widths, given, named) -> int:
    times = collections.Counter(name for name in names if name)
    size = text_size(*given, *named.values()) * max(times.values(), default=1)
    if not all(width.isdigit() for width in widths):
        raise TooMuch("a width that another argument gives")
    return size + sum(int(width[:20]) for width in widths)


def _untabbed(text, tabsize=8):
    return text.count(b"\t" if isinstance(text, bytes) else "\t") * tabsize


def _width(text, width=80, *_):
    return width


# Filters of texts; None: about as long as the text.
FILTERS: dict[str, Callable[..., int] | None] = {
    **dict.fromkeys("capitalize e escape forceescape lower string striptags".split()),
    **dict.fromkeys("title trim upper urlencode xmlattr".split()),
    "center": _width,
    "format": percent_size,
    "indent": _indented,
    "join": _joined,
    "pprint": lambda value, *_, **__: 64 * text_size(value),
    "replace": _replaced,
    "round": _rounded,
    "truncate": lambda text, *_, end="...", **__: len(end),
    "urlize": _linked,
    "wordwrap": _wrapped,
}
# Filters that arrange items, with how many they add.
SHAPERS: dict[str, Callable[..., int] | None] = {
    **dict.fromkeys(("list", "reverse")),
    "batch": lambda values, linecount, fill_with=None: linecount,
    "slice": lambda values, slices, fill_with=None: slices,
    "sum": _summed,
}
# Methods of texts that may make them longer.
METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    "expandtabs": _untabbed,
    "format": _braces,
    "format_map": _braces,
    "join": lambda text, values: len(text) * len(values),
    "replace": _replaced,
    "translate": lambda text, table: len(text) * text_size(table),
}
