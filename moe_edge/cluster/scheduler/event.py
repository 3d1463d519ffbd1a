"""What the scheduler's one thread takes: what servers say, and what became of them."""

from typing import Any, NamedTuple

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


class Event(NamedTuple):
    """Something that a server has said (`SAID`), or that became of it.

    Of what became of it, these are for `serving.py`: gone (it is lost), slow (a call to
    it is overdue), apart and together (it cannot reach another one; it can again), back
    (it was lost and asks to be taken in again), returned (it is on the list again).

    Attributes:
      server: who; name: what.
      at_s: when it came, by `time.perf_counter`.
    """

    server: int
    name: str
    fields: dict
    at_s: float

    @property
    def is_well_formed(self) -> bool:
        """Whether what was said has what its readers look up."""
        for key, kind in SAID.get(self.name, {}).items():
            value = self.fields.get(key)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                return False
        own = self.fields.get("own", ()) if self.name == "arrived" else ()
        return all(_is_cell(cell) for cell in own)


def _is_cell(cell: Any) -> bool:
    """Layer and block."""
    both = isinstance(cell, list) and len(cell) == 2
    return both and all(type(number) is int for number in cell)
