"""Parts of pages that the code knows better than any text: filled in by each build.

A page asks for one by a comment, `<!-- generated: NAME ARGUMENT -->`.
"""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import moe_edge
from moe_edge.commands import main

ROOT = Path(__file__).resolve().parents[1]
# A paragraph's last line, which is no header of a section, and what is indented below.
INDENTED = re.compile(
    r"^(?!\w+:$)(\S.*)\n\n((?: {4,}\S.*\n?|\n(?= {4}))+)", re.MULTILINE
)
ASKED = re.compile(r"<!-- generated: (\w+) ?(\S*) -->")


def fill(app, page: str, source: list[str]) -> None:
    """Handler of Sphinx's `source-read`: comments become what they ask for."""
    if page.startswith(("docs/", "moe_edge/papers/")):
        source[0] = ASKED.sub(lambda asked: PARTS[asked[1]](asked[2]), source[0])


def as_written(app, what, name, found, options, lines: list[str]) -> None:
    """Handler of `autodoc-process-docstring`, before sections are read: our docstrings
    are plain text, where reStructuredText wants more.

    An indented block in a text, such as a list of calls, is shown as it stands; a
    section of one line (`Args: as generate.`) ends with it; `**options` is no emphasis.
    """
    text = INDENTED.sub(r"\1\n\n::\n\n\2", "\n".join(lines))
    text = re.sub(
        r"^([A-Z]\w+: \S.*)\n(?=[A-Z]\w+:)", r"\1\n\n", text, flags=re.MULTILINE
    )
    text = re.sub(r"^( +\w.*, )\*\*(?=\w+:)", r"\1\\*\\*", text, flags=re.MULTILINE)
    lines[:] = text.splitlines()


def entries(prefix: str) -> str:
    """Rows of results/README.md, without pictures, whose entry's name begins with
    `prefix`."""
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| <img [^|]*(\| \[{prefix}.*)$", page, re.MULTILINE)
    if not rows:
        raise ValueError(f"results/README.md has no entry that begins with {prefix}")
    head = "| entry | answer | kind | machine |\n|---|---|---|---|\n"
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
    found = getattr(moe_edge, name)
    is_class = inspect.isclass(found)
    # Under another name Sphinx shows no more than "alias of".
    place = "moe_edge" if found.__name__ == name else found.__module__
    kind = "autoclass" if is_class else "autofunction"
    lines = [f".. {kind}:: {place}.{found.__name__}"]
    if is_class and kind_of(name) != "errors":
        lines += ["   :members:"]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def plug_ins(_: str) -> str:
    """The contract of every base class."""
    found = [name for name in moe_edge.__all__ if kind_of(name) == "plug_ins"]
    return "\n\n".join(f"### me.{name}\n\n{documented(name)}" for name in found)


def commands(_: str) -> str:
    """What `moe-edge NAME --help` prints, of every command."""
    parts = []
    for name in main.names():
        done = subprocess.run(
            [sys.executable, "-m", main.__name__, name, "--help"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=ROOT,  # whose files python -m takes first
            env=os.environ | {"COLUMNS": "100"},
        )
        parts.append(f"## {name}\n\n```text\n{done.stdout.strip()}\n```")
    return "\n\n".join(parts)


PARTS: dict[str, Callable[[str], str]] = {
    "entries": entries,
    "public": public,
    "plug_ins": plug_ins,
    "commands": commands,
}
