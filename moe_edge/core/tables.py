"""What the papers add to the framework, by kind and name, read from their tables.

A room is a folder of `moe_edge/papers`, or `moe_edge/studies`, which stands above them.
Its `plugins.py` holds PLUGINS, rows of a kind, a name and `module:object`, the module
counted from the room. Reading it imports nothing else: what a row names is imported
when it is asked for. A room that is deleted takes its names with it.

| kind | what is named |
|---|---|
| eviction, predictor, route, assist, placer, scheduler | a class, `@register`ed |
| root | the function behind a command, as gin binds it |
| command | `main` of a script: its module's docstring is its help |
| mode | a way to run a cluster (`cluster/modes.py`) |
| study | a `Study`, or several by name |
"""

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
TABLE = "plugins.py"


def rooms() -> list[str]:
    """Packages that have a table, sorted."""
    found = [*(PACKAGE / "papers").glob(f"*/{TABLE}"), PACKAGE / "studies" / TABLE]
    return sorted(
        ".".join([PACKAGE.name, *path.parent.relative_to(PACKAGE).parts])
        for path in found
        if path.is_file()
    )


@functools.cache
def _rows(room: str) -> tuple[tuple[str, str, str], ...]:
    return importlib.import_module(f"{room}.plugins").PLUGINS


def _of_kind(kind: str) -> Iterator[tuple[str, str]]:
    for room in rooms():
        for its_kind, name, place in _rows(room):
            if its_kind == kind:
                yield name, f"{room}.{place}"


@functools.cache
def plugins(kind: str) -> dict[str, str]:
    """Name -> `module:object` of all that the rooms add of one kind, sorted.

    Folders are looked through once: names are asked for with every option.
    """
    return dict(sorted(_of_kind(kind)))


def load(place: str) -> Any:
    """What `module:object` names; its module is imported."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
