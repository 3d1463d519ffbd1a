"""Does what `accusations.py` decides: asks the accused, has the accuser connect again.

The accused are asked in threads of their own, so that nobody else waits for them.
"""

import collections
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moe_edge.cluster.scheduler.accusations import (
    Accusations,
    Action,
    Apart,
    Ask,
    Connect,
    Lost,
    Slow,
    Together,
)
from moe_edge.cluster.scheduler.event import Event

if TYPE_CHECKING:
    from moe_edge.cluster.scheduler.scheduler import Scheduler


class Inquiries:
    """What is being looked into, and what has been decided and nobody has taken yet.

    Args:
      hung_s: how long an accused may be silent.
      calls_s: in which one that is not stuck has ended the calls that it has.

    Attributes:
      accusations: and the pairs of servers that do not reach each other.
    """

    def __init__(self, scheduler: "Scheduler", hung_s: float, calls_s: float):
        self._scheduler, self._hung_s, self._calls_s = scheduler, hung_s, calls_s
        self.accusations = Accusations()
        self._decided: collections.deque[Event] = collections.deque()

    def next_decided(self) -> Event | None:
        """The next thing that was decided, for who serves; None: nothing."""
        self._act(self.accusations.due())
        return self._decided.popleft() if self._decided else None

    def takes(self, event: Event) -> bool:
        """Whether an event is a part of an inquiry, which then goes on."""
        accusations, fields = self.accusations, event.fields
        if event.name == "lost":
            who, kind = fields["who"], fields["kind"]
            if self._scheduler.is_alive(who):
                self._act(accusations.accuse(event.server, who, kind))
        elif event.name == "asked":
            self._act(accusations.answered(fields["question"], fields["lost"]))
        elif event.name == "reached":
            who, reached = fields["who"], fields["reached"]
            self._act(accusations.connected(event.server, who, reached))
        else:
            return False
        return True

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            now_s = time.perf_counter()
            match action:
                case Ask():
                    args = [action]
                    threading.Thread(target=self._ask, args=args, daemon=True).start()
                case Connect(by, who):
                    fields = {"server": who, "within_s": self._hung_s}
                    self._scheduler.tell(by, "reach", fields)
                case Lost(server, kind):
                    self._decided.append(Event(server, "gone", {"kind": kind}, now_s))
                case Slow(server):
                    self._decided.append(Event(server, "slow", {}, now_s))
                case Together(by, who):
                    self._decided.append(Event(by, "together", {"who": who}, now_s))
                case Apart(by, who):
                    self._decided.append(Event(by, "apart", {"who": who}, now_s))
                    print(
                        f"warning: server {by} cannot reach server {who}, though both "
                        "answer the scheduler; others are asked instead",
                        file=sys.stderr,
                    )

    def _ask(self, question: Ask) -> None:
        """Asks an accused."""
        scheduler, server, lost = self._scheduler, question.server, None
        if not question.calls:
            lost = scheduler.lost_as(server, self._hung_s)
        elif scheduler.ask(server, "time", self._calls_s) is None:
            lost = "hung"
        scheduler.happened(server, "asked", question=question, lost=lost)
