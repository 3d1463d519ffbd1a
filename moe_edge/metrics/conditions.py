"""On what and with which settings two entries were measured, where it differs."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MACHINE = ("cpu", "cores", "gpu", "jax", "backend", "kernels")


def other_settings(entry: str | Path, again: str | Path) -> list[str]:
    """Lines of config.gin that only one of the entries has, but for where they lie and
    how many starts were made."""
    mine, its = (
        Path(folder, "config.gin").read_text(encoding="utf-8").splitlines()
        for folder in (entry, again)
    )
    names = "append|allow_dirty|data_dir|out_dir|overwrite|starts"
    elsewhere = re.compile(rf"(?:#.*|OUT_DIR.*|\w+\.(?:{names}) = .*|\s*)")
    differing = [*(set(mine) - set(its)), *(set(its) - set(mine))]
    return sorted(line for line in differing if not elsewhere.fullmatch(line))


def other_conditions(mine: Mapping[str, Any], its: Mapping[str, Any]) -> list[str]:
    """What two entries were measured on and with, where it differs."""
    found = []
    for part, keys in (("machine", MACHINE), ("model", ("name", "weights"))):
        for key in keys:
            one, other = (entry[part].get(key) for entry in (mine, its))
            if one != other:
                found.append(f"{part}'s {key} {one}, again {other}")
    if mine["seeds"] != its["seeds"]:
        found.append(f"seeds {mine['seeds']}, again {its['seeds']}")
    return found
