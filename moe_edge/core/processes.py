"""Which of several processes of one run this is: process 0 writes and prints.

`hosts/` says so at the start; whatever writes a result asks here. A process that runs
alone is process 0 of 1.
"""

_this = (0, 1)  # index, count


def become(index: int, count: int) -> None:
    """From here on this process is one of several."""
    global _this
    _this = index, count


def index() -> int:
    """The number of this process, from 0."""
    return _this[0]


def count() -> int:
    """How many processes run together."""
    return _this[1]


def writes() -> bool:
    """Whether this process writes results: the first one does."""
    return index() == 0
