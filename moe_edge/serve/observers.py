"""Whoever wants to know what a server does: metrics, the log of requests."""

from collections.abc import Sequence

from moe_edge.schedule.request import Request
from moe_edge.serve.driver import Driver, Stepped
from moe_edge.serve.errors import report


class Observer:
    """Is told what happens."""

    def ready(self, driver: Driver) -> None:
        """On the engine thread: the first step is to come."""

    def stepped(self, driver: Driver, stepped: Stepped) -> None:
        """On the engine thread, after a step that computed something, or tried to."""

    def ended(self, endpoint: str, row: Request) -> None:
        """On the event loop: a request is over, in whichever way."""

    def refused(self, endpoint: str, count: int) -> None:
        """On the event loop: requests that the engine was not even asked for."""


class Observers:
    """Tells all. One that fails takes no request with it, and is reported once."""

    def __init__(self, observers: Sequence[Observer]):
        self.all = tuple(observers)
        self._reported: list[Observer] = []

    def tell(self, what: str, *given) -> None:
        """Calls one of the methods of each."""
        for observer in self.all:
            try:
                getattr(observer, what)(*given)
            except Exception as error:
                if observer not in self._reported:
                    self._reported.append(observer)
                    report(error)
