"""Which file `--gin_file` names: a path, or the name of a file that comes with us."""

import re
from collections.abc import Iterable
from pathlib import Path

from moe_edge.core.checks import ConfigError
from moe_edge.core.suggest import did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
ENDING = ".gin"


def folder() -> Path:
    """Where our gin files are: in the clone that this package is imported from, else
    in the installed package.

    Found by the package's own place, not by import: files of one version never run
    with code of another.
    """
    clone = PACKAGE.parent
    is_clone = (clone / "pyproject.toml").is_file() and (clone / "configs").is_dir()
    return (clone if is_clone else PACKAGE) / "configs"


def find(given: str) -> str:
    """The path of what `--gin_file` says.

    Args:
      given: a path, or the name of one of our files: `smoe` or `policies/smoe` for
        `configs/policies/smoe.gin`. A file in the working directory comes first.
    Raises:
      ConfigError: a name of several of our files, or of none.
    """
    path = Path(given)
    if path.is_file() or path.is_absolute() or given.startswith("."):
        return given
    here = folder()
    ours = {
        file.relative_to(here.parent).as_posix(): file
        for file in here.rglob(f"*{ENDING}")
    }
    if given.endswith(ENDING):  # a path: ours only as our documents write it
        return str(ours.get(given, given))
    named = [key for key in ours if f"/{key}".endswith(f"/{given}{ENDING}")]
    if len(named) == 1:
        return str(ours[named[0]])
    if named:
        each = " or ".join(sorted(key.removesuffix(ENDING) for key in named))
        raise ConfigError(f"--gin_file {given} is the name of several: write {each}")
    if path.exists():
        return given
    meant = did_you_mean(given, {Path(key).stem for key in ours})
    raise ConfigError(
        f"--gin_file {given}: no such file, and none of this name in {here}; "
        f"{meant}expected a path, or the name of a file there without {ENDING}"
    )


def place_of(message: str, files: Iterable[str]) -> str:
    """`FILE:LINE: ` of the value that a message refuses, if a gin file gave it, or "".

    A value is checked when a run begins, long after its line was read. So the first
    text in quotes is looked for; it must stand in one line alone.

    Args:
      files: that the run was given, in their order.
    """
    found = re.search(r"'([^']+)'", message)
    if found is None:
        return ""
    value = re.compile(rf"""=.*(['"]){re.escape(found[1])}\1""")
    places = []
    for file in files:
        if file in message:
            return ""
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        places += [
            f"{file}:{number}: "
            for number, line in enumerate(lines, 1)
            if value.search(line.partition("#")[0])
        ]
    return places[0] if len(places) == 1 else ""
