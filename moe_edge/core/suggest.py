"""How an unknown name is refused: the nearest known one, then all."""

import difflib
from collections.abc import Collection


def unknown(kind: str, name: str, known: Collection[str], hidden=()) -> str:
    """The message. It does not list the `hidden` ones of the known names."""
    shown = ", ".join(sorted(set(known) - set(hidden))) or "none"
    return f"unknown {kind} {name!r}; {did_you_mean(name, known)}known: {shown}"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`did you mean 'x'? `, or nothing where no known name is near."""
    near = difflib.get_close_matches(str(name), sorted(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
