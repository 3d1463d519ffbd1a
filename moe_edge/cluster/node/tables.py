"""Which server is asked for each block: versions of one table, changed between steps.

The scheduler sends a server its own row of the table. The server takes it over between
two steps, so that a step sees one version, and confirms it. Only where a call failed
does a step wait for the next version and ask again.
"""

import threading
from typing import NamedTuple

import numpy as np

from moe_edge.cluster.node.holdings import Holdings

HERE = -1  # in `View.asked_LE`: in a slot of this server


class View(NamedTuple):
    """A table as one server sees it; column E is of padding, which nobody computes.

    Attributes:
      version: of the table.
      target_LE: int16 [L, E + 1], the server that computes a block.
      asked_LE: int16 [L, E + 1], the server to call; HERE: none. The server's own
        number: it reads the block for each call, since nobody has it.
      slot_LE: int32 [L, E + 1], slots of the blocks that are HERE, else no slot.
      all_here_L: whether a layer has all its blocks here.
    """

    version: int
    target_LE: np.ndarray
    asked_LE: np.ndarray
    slot_LE: np.ndarray
    all_here_L: np.ndarray


def view_of(
    version: int,
    target_LE: np.ndarray,
    me: int,
    holdings: Holdings,
    read_LE: np.ndarray | None = None,
) -> View:
    """The view of server `me`, whose own blocks have arrived.

    Args:
      read_LE: bool, blocks that are read for each call: one may be here and leave soon.
    """
    nowhere = holdings.nowhere
    here_LE = (target_LE == me) & holdings.held_LE
    if read_LE is not None:
        here_LE &= ~read_LE
    asked_LE = np.where(here_LE, HERE, target_LE).astype(np.int16)
    slot_LE = np.where(here_LE, holdings.slot_LE, nowhere).astype(np.int32)
    asked_LE = np.pad(asked_LE, ((0, 0), (0, 1)), constant_values=HERE)
    slot_LE = np.pad(slot_LE, ((0, 0), (0, 1)), constant_values=nowhere)
    target_LE = np.pad(target_LE, ((0, 0), (0, 1)), constant_values=me)
    return View(version, target_LE, asked_LE, slot_LE, here_LE.all(axis=1))


class Tables:
    """The view in force, and newer ones as they come; threads may wait for one.

    Attributes:
      view: in force.
    """

    def __init__(self, me: int, holdings: Holdings):
        self._me, self._holdings = me, holdings
        self._changed = threading.Condition()
        self._next: View | None = None
        self._closed: Exception | None = None
        self.view: View | None = None

    def offer(self, version: int, target_LE: np.ndarray, read_LE=None) -> None:
        """A new table has come (`view_of`); it is in force from `install` on."""
        view = view_of(version, target_LE, self._me, self._holdings, read_LE)
        with self._changed:
            known = self._next or self.view
            if known is None or version > known.version:
                self._next = view
                self._changed.notify_all()

    def begin(self, version: int, target_LE: np.ndarray, read_LE=None) -> None:
        """The first table of a run, whatever the number of the last one was."""
        with self._changed:
            self.view = self._next = self._closed = None
        self.offer(version, target_LE, read_LE)
        self.install()

    def install(self) -> int | None:
        """Takes over the newest table, between steps: its version if it is new."""
        with self._changed:
            if self._next is None:
                return None
            self.view, self._next = self._next, None
            return self.view.version

    def newer(self, version: int, deadline_s: float) -> View | None:
        """Waits for a table above a version, inside a step; None if none came."""

        def latest() -> View | None:
            if self._closed is not None:
                raise self._closed
            return self._next or self.view

        def there() -> bool:
            view = latest()
            return view is not None and view.version > version

        with self._changed:
            return latest() if self._changed.wait_for(there, deadline_s) else None

    def close(self, error: Exception) -> None:
        """Whoever waits gets this error: the run is over, until the next `begin`."""
        with self._changed:
            self._closed = error
            self._changed.notify_all()
