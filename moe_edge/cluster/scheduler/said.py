"""What processes may say to the scheduler, and how it reads it."""

from collections.abc import Mapping
from typing import Any

NUMBER = (int, float)
SAID: dict[str, dict[str, Any]] = {  # name -> types of its fields
    "there": {},  # it has joined and loaded
    "warm": {"seconds": NUMBER},  # all is compiled
    "ready": {"number": int},  # for a run: the number of the order to prepare for it
    "token": {"id": int, "token": int, "done": bool},
    # It was away and asks to be taken in again; of the last `return` since, else 0.
    "back": {"number": int},
    "failed": {"id": int, "error": str},  # a request, by its own error
    "lost": {"who": int, "kind": str},  # another process, as far as it can tell
    "reached": {"who": int, "reached": bool},  # whether it has connected again
    "arrived": {"order": int, "own": list},  # blocks, some from the own checkpoint
    "confirmed": {"version": int},  # a table
    "over": {},  # it takes no requests any more
    "finished": {},  # all that was on its way has come
}


def is_well_formed(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether a message of a known name has what its readers look up."""
    for key, kind in SAID[name].items():
        value = fields.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            return False
    return "own" not in SAID[name] or all(_is_cell(cell) for cell in fields["own"])


def _is_cell(cell: Any) -> bool:
    """Layer and block."""
    both = isinstance(cell, list) and len(cell) == 2
    return both and all(type(number) is int for number in cell)
