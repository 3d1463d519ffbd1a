"""Starts commands: `moe-edge NAME --flags`, or `python launch/NAME.py --flags`.

A command is a file in `scripts/`, or of a paper, whose table names it (core/tables.py);
its docstring begins with the line that the list of commands shows. Only the command
that runs is imported.
"""

import ast
import importlib
import sys
from pathlib import Path

from moe_edge.commands import signals
from moe_edge.core import tables

SCRIPTS = Path(__file__).parent / "scripts"
HELP = ("-h", "-help", "--help", "help")
USAGE = """\
Mixture-of-Experts language models on machines too small for them.

moe-edge NAME [--flags]     runs a command
moe-edge NAME --help        lists its flags

commands:"""


def main() -> None:
    """The console script `moe-edge`; never returns."""
    signals.install_early()
    name, *flags = sys.argv[1:] or HELP[:1]
    if name in HELP:
        from moe_edge.commands.common import guarded

        sys.exit(guarded(lambda _: print(list_text(), flush=True) or 0, sys.argv))
    if name not in names():
        print(f"error: {refusal(name)}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"moe-edge {name}", *flags]
    start(name)


def run_file(file: str) -> None:
    """Runs the command that a script in launch/ is named after; never returns.

    `python launch/evaluate.py` puts launch/ first in `sys.path`, where evaluate.py
    would hide any other package of that name: the folder is removed.

    Args:
      file: the script's `__file__`.
    """
    signals.install_early()
    script = Path(file).resolve()
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != script.parent
    ]
    start(script.stem)


def start(name: str) -> None:
    """Imports a command and runs it by the flags in `sys.argv`; never returns."""
    importlib.import_module(_module(name)).main()


def names() -> list[str]:
    """All commands."""
    own = (path.stem for path in SCRIPTS.glob("[!_]*.py"))
    return sorted([*own, *tables.plugins("command")])


def _module(name: str) -> str:
    of_papers = tables.plugins("command").get(name)
    if of_papers is None:
        return f"moe_edge.commands.scripts.{name}"
    return of_papers.partition(":")[0]


def script(name: str) -> Path:
    """The file of a command."""
    return tables.PACKAGE.parent.joinpath(*_module(name).split(".")).with_suffix(".py")


def list_text() -> str:
    """Every command with the first line of its docstring, which is not imported."""
    width = 2 + max(map(len, names()))
    return "\n".join([USAGE, *(f"  {n:{width}}{first_line(n)}" for n in names())])


def first_line(name: str) -> str:
    """The first line of a command's docstring."""
    source = script(name).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def refusal(name: str) -> str:
    """Why `moe-edge NAME` is no command, in one line."""
    if name.startswith("-"):
        return f"{name} comes before the command; write moe-edge NAME {name}"
    from moe_edge.core.suggest import unknown

    return unknown("command", name, names())


if __name__ == "__main__":  # `python -m`: without the console script
    main()
