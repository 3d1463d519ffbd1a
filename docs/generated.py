"""Parts of pages that the code knows better than any text: filled in by each build.

A page asks for one by a comment, `<!-- generated: NAME ARGUMENT -->`.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import moe_edge

ROOT = Path(__file__).resolve().parents[1]
ASKED = re.compile(r"<!-- generated: (\w+) ?(\S*) -->")
# What plug-ins stand in; all of their files are imported, so that classes are known.
FOLDERS = ("offload", "predict", "route", "schedule", "place")


def fill(app, page: str, source: list[str]) -> None:
    """Handler of Sphinx's `source-read`: comments become what they ask for."""
    if page.startswith("docs/"):
        source[0] = ASKED.sub(lambda asked: PARTS[asked[1]](asked[2]), source[0])


def entries(prefix: str) -> str:
    """Rows of results/README.md whose entry's name begins with `prefix`."""
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(f"| [{prefix}")]
    if not rows:
        raise ValueError(f"results/README.md has no entry that begins with {prefix}")
    head = "| entry | question | answer | kind | machine |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows).replace("](", "](/results/")


def public(kind: str) -> str:
    """Docstrings of the public names: `functions`, `classes`, `errors`."""
    found = [name for name in moe_edge.__all__ if kind_of(name) == kind]
    return "\n\n".join(map(documented, found))


def kind_of(name: str) -> str:
    """Which part of the reference a public name stands in."""
    found = getattr(moe_edge, name)
    if not inspect.isclass(found):
        return "functions"
    if issubclass(found, Exception):
        return "errors"
    return "plug_ins" if hasattr(found, "required") else "classes"


def documented(name: str) -> str:
    """The directive that makes a name's docstring part of a page."""
    is_class = inspect.isclass(getattr(moe_edge, name))
    lines = [f".. {'autoclass' if is_class else 'autofunction'}:: moe_edge.{name}"]
    if is_class and kind_of(name) != "errors":
        lines += ["   :members:"]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def known(base: str) -> str:
    """The policies of a base class: name, what it does, its source.

    Args:
      base: a public name, or MODULE.CLASS within the package.
    """
    module, _, name = f"moe_edge.{base}".rpartition(".")
    kinds = named(getattr(importlib.import_module(module), name))
    rows = sorted(((each.name, each) for each in kinds), key=lambda row: row[0])
    if not rows:
        raise ValueError(f"moe_edge.{base} has no subclass")
    lines = ["| name | what it does | source |", "|---|---|---|"]
    for name, kind in rows:
        what = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{name}` | {what} | {getattr(kind, 'SOURCE', '')} |")
    return "\n".join(lines)


def named(base: type) -> Iterator[type]:
    """Subclasses of `base` in the package that have a name of their own."""
    for folder in FOLDERS:
        package = importlib.import_module(f"moe_edge.{folder}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"moe_edge.{folder}.{module.name}")
    todo = [base]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__module__.startswith("moe_edge.") and is_named(kind):
            yield kind


def is_named(kind: type) -> bool:
    """Whether it is asked for by name; a base class is named by its class."""
    name = kind.__dict__.get("name")
    return isinstance(name, str) and name not in ("", kind.__name__)


def plug_ins(_: str) -> str:
    """The contract of every base class, and the policies that keep it."""
    found = [name for name in moe_edge.__all__ if kind_of(name) == "plug_ins"]
    return "\n\n".join(f"### {name}\n\n{documented(name)}" for name in found)


def policies(_: str) -> str:
    """A table for every base class."""
    found = [name for name in moe_edge.__all__ if kind_of(name) == "plug_ins"]
    return "\n\n".join(f"### {name}: names\n\n{known(name)}" for name in found)


PARTS: dict[str, Callable[[str], str]] = {
    "entries": entries,
    "public": public,
    "known": known,
    "plug_ins": plug_ins,
    "policies": policies,
}
