"""Policies of other packages: classes that entry points of installed packages name.

    [project.entry-points."moe_edge.policies"]
    my_policy = "my_package.my_module:MyPolicy"

The class's base says what kind of policy it is, its `name` is the entry point's.
"""

import functools
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint

from moe_edge.core.checks import ConfigError

GROUP = "moe_edge.policies"
REMEDY = "repair or uninstall that package"


def entry_points() -> Mapping[str, Sequence[EntryPoint]]:
    """Of installed packages, by name; nothing is imported."""
    return _entry_points(tuple(sys.path))


@functools.cache
def _entry_points(path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    by_name: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        by_name.setdefault(point.name, []).append(point)
    return by_name


def origin(point: EntryPoint) -> str:
    """The policy and its package, for messages."""
    package = point.dist.name if point.dist is not None else "unknown"
    return f"policy {point.name!r} of package {package} ({point.value})"


@functools.cache
def load(point: EntryPoint) -> object:
    """What an entry point names; ConfigError: it cannot be imported."""
    try:
        return point.load()
    except Exception as error:  # whatever another author's module raises
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"{type(error).__name__}: {reason}") from error


@functools.cache
def warn(text: str) -> None:
    """Prints a line on stderr, once."""
    print(text, file=sys.stderr)
