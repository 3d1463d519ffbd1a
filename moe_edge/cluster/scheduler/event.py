"""What the scheduler's one thread takes: what servers say, and what became of them."""

from typing import NamedTuple


class Event(NamedTuple):
    """Something that a server has said (`said.py`), or that became of it.

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
