"""Which start of a study this process is, for what differs between starts.

`starts.py` sets it; orders of rounds and pools of prompts read it.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_NUMBER: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "start", default=None
)


def start_number() -> int | None:
    """The number of the start, from 0; None where the study is no start."""
    return _NUMBER.get()


@contextlib.contextmanager
def started(number: int) -> Iterator[None]:
    """What is measured inside is start `number`."""
    token = _NUMBER.set(number)
    try:
        yield
    finally:
        _NUMBER.reset(token)
