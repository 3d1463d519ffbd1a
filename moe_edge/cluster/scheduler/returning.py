"""How a server that was lost comes back: it was paused, or its network was.

It says `back` until it is heard. The scheduler connects to it, whoever serves a run has
it prepare, and when it is ready it is on the list again: with nothing of what it had.
"""

import sys
import threading
from typing import TYPE_CHECKING

from moe_edge.cluster.roles import FIRST
from moe_edge.cluster.scheduler.event import Event

if TYPE_CHECKING:
    from moe_edge.cluster.scheduler.scheduler import Scheduler


class Returning:
    """Servers that are off the list and on their way back.

    Args:
      within_s: in which others must have connected to one.
    """

    def __init__(self, scheduler: "Scheduler", within_s: float):
        self._scheduler, self._within_s = scheduler, within_s
        self._greeted: set[int] = set()  # are being connected to
        self._preparing: set[int] = set()
        self._too_late: set[int] = set()  # prepare for a run that is over

    def restart(self) -> None:
        """A new run begins: who prepares for the last one must come back again."""
        self._too_late |= self._preparing
        self._preparing.clear()

    def hears(self, event: Event) -> Event | None:
        """What a server says that is off the list: an event for who serves, if any."""
        server, name = event.server, event.name
        known = self._greeted | self._preparing | self._too_late
        if name == "back" and server not in known:
            self._greeted.add(server)
            threading.Thread(target=self._greet, args=[server], daemon=True).start()
        elif name == "greeted":
            self._greeted.discard(server)
            if event.fields["reached"]:
                return event._replace(name="back", fields={})
        elif name == "gone":
            self._preparing.discard(server)
            self._too_late.discard(server)
        elif name == "ready" and server in self._too_late:
            self._too_late.discard(server)
            self._scheduler.tell(server, "away")
        elif name == "ready" and server in self._preparing:
            self._preparing.discard(server)
            print(f"server {server} is back, with no blocks", file=sys.stderr)
            self._scheduler.take_in(server, {"within_s": self._within_s})
            return event._replace(name="returned")
        return None

    def prepare(self, server: int, fields: dict, arrays: dict) -> None:
        """Has a server prepare for the run that is being served."""
        self._preparing.add(server)
        more = {"servers": self._scheduler.alive, "within_s": self._within_s}
        self._scheduler.tell(server, "return", fields | more, arrays)

    def _greet(self, server: int) -> None:
        """Connects to a server, in a thread of its own."""
        reached = self._scheduler.transport.reach(FIRST + server, self._within_s)
        self._scheduler.happened(server, "greeted", reached=reached)
