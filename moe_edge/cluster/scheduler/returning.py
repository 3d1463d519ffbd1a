"""How a server that was lost comes back: it was paused, or its network was.

It says `back` until it is told that it is taken in. The scheduler connects to it,
whoever serves a run has it prepare, and when it is ready it is on the list again: with
nothing of what it had. Orders to prepare have numbers, and who is ready names its one:
a server may also have been told to prepare before it was lost.
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
        self._preparing: dict[int, int] = {}  # server -> number of the order
        self._taken_in: dict[int, int] = {}

    def restart(self) -> None:
        """A new run begins: who prepares for the last one must come back again."""
        self._preparing.clear()

    def knows(self, event: Event) -> bool:
        """Whether a `back` is older than the news that its server was taken in."""
        return event.fields["number"] == self._taken_in.get(event.server)

    def hears(self, event: Event) -> Event | None:
        """What a server says that is off the list: an event for who serves, if any."""
        server, name = event.server, event.name
        known = self._greeted | self._preparing.keys()
        if name == "back" and server not in known:
            self._greeted.add(server)
            threading.Thread(target=self._greet, args=[server], daemon=True).start()
        elif name == "greeted":
            self._greeted.discard(server)
            if event.fields["reached"]:
                return event._replace(name="back", fields={})
        elif name == "gone":
            self._preparing.pop(server, None)
        elif name == "ready" and server in self._preparing:
            number = self._preparing[server]
            if event.fields.get("number") == number:
                del self._preparing[server]
                self._taken_in[server] = number
                print(f"server {server} is back, with no blocks", file=sys.stderr)
                self._scheduler.take_in(server, {"within_s": self._within_s})
                self._scheduler.tell(server, "taken_in", {"number": number})
                return event._replace(name="returned", fields={})
        return None

    def prepare(self, server: int, fields: dict, arrays: dict) -> None:
        """Has a server prepare for the run that is being served."""
        self._preparing[server] = number = self._scheduler.new_number()
        more = {"servers": self._scheduler.alive, "within_s": self._within_s}
        more["number"] = number
        self._scheduler.tell(server, "return", fields | more, arrays)

    def _greet(self, server: int) -> None:
        """Connects to a server, in a thread of its own."""
        reached = self._scheduler.transport.reach(FIRST + server, self._within_s)
        self._scheduler.happened(server, "greeted", reached=reached)
