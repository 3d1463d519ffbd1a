"""The file of an entry that keeps what its starts measured, and the check of it."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.core.json_reader import as_read_back, read_json
from moe_edge.metrics.frames import Frame, plain

FILE = "starts.json"
Start = dict[str, Any]  # facts of `starts._taken`, and what `run_start` returned


def stored_text(
    settings: Any, starts: Sequence[Start], added_to: int | None = None
) -> str:
    """The file of an entry to which further starts can be added.

    Args:
      added_to: how many of them the entry has, of a run that is under way.
    """
    about = {"settings": plain(dataclasses.asdict(settings)), "starts": list(starts)}
    if added_to is not None:
        about["added_to"] = added_to
    return json.dumps(as_read_back(about), indent=None) + "\n"


def read_starts(out_dir: str | Path, study: Study, settings: Any) -> list[Start]:
    """Those of an entry, for more.

    Raises:
      ConfigError: there are none, or they were made with other settings or by a version
        with other rows.
    """
    path = Path(out_dir) / FILE
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: only an entry made with --starts can be added to; "
            "take --overwrite instead of --append"
        )
    return read_kept(path, study, settings, "take --overwrite instead of --append")[0]


def read_tries(out_dir: str | Path, study: Study) -> list[Start]:
    """All of an entry, whatever its settings.

    Raises:
      ConfigError: they are damaged or of a version with other rows.
    """
    return _read(Path(out_dir) / FILE, study, "measure the entry again")["starts"]


def read_kept(
    path: Path, study: Study, settings: Any, else_do: str
) -> tuple[list, int]:
    """Starts of a file, and to how many of them the others were to be added."""
    stored = _read(path, study, else_do)
    wanted = as_read_back(plain(dataclasses.asdict(settings)))
    # A setting that came later has a default that changed nothing.
    before = as_read_back(plain(dataclasses.asdict(type(settings)())))
    before |= stored["settings"]
    for name in sorted(wanted.keys() - {"data_dir"}):
        if (was := before[name]) != wanted[name]:
            raise ConfigError(
                f"{path} was measured with {name} {was}, {wanted[name]} is asked for; "
                f"keep the settings, or {else_do}"
            )
    return stored["starts"], stored.get("added_to", 0)


def _read(path: Path, study: Study, else_do: str) -> dict[str, Any]:
    """A file of starts, whose rows are those of the study as it is now."""
    stored = read_json(path)
    held = stored if isinstance(stored, dict) else {}
    if not (
        isinstance(held.get("settings"), dict)
        and isinstance(held.get("starts"), list)
        and isinstance(held.get("added_to", 0), int)
        and all(_is_start(study, start) for start in held["starts"])
    ):
        raise ConfigError(
            f"{path} holds no starts that {study.name} can be joined with: it is "
            f"damaged, or of a version with other rows; {else_do}"
        )
    return held


def _is_start(study: Study, start: Any) -> bool:
    """Whether it is what `take_starts` makes of the study as it is now."""
    match start:
        case {
            "number": int(),
            "started_utc": str(began),
            "busy": bool(),
            "frames": dict(frames),
        } if re.match(r"\d{4}-\d\d-\d\dT", began):
            parts = (start.get(part) for part in ("checks", "about", "files"))
            return all(isinstance(part, dict) for part in parts) and all(
                name in study.frames
                and isinstance(rows, list)
                and all(_is_row(study.frames[name], row) for row in rows)
                for name, rows in frames.items()
            )
    return False


def _is_row(declared: Frame, row: Any) -> bool:
    match row:
        case {"keys": [*keys], "values": dict(values), "within": dict(within)}:
            numbers = [*values.values(), *within.values()]
            return (
                len(keys) == len(declared.keys)
                and within.keys() <= values.keys() <= declared.units.keys()
                and all(isinstance(each, list) and each for each in numbers)
                and all(isinstance(n, int | float) for each in numbers for n in each)
            )
    return False
