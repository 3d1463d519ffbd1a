"""What the engine's thread does: what it was asked for, steps, and news of them.

A step wakes the event loop once at most, however many rows it has; steps that follow
each other fast do so once for several, unless a row begins or ends.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from moe_edge.core.checks import MoeEdgeError
from moe_edge.schedule.request import Request
from moe_edge.serve.call import Call
from moe_edge.serve.driver import Driver, Stepped
from moe_edge.serve.errors import report
from moe_edge.serve.observers import Observers

MOST_FAILED_STEPS = 3  # in a row
# Between two wake-ups of the event loop for tokens alone: what they cost is taken from
# the cores that compute.
TELL_S = 0.01

News = dict[tuple[Call, int], bool]  # (call, row of it) -> whether it is over


class EngineLostError(MoeEdgeError):
    """Steps fail again and again."""

    exit_code = 1


class Listener(Protocol):
    """Who is told; `post` has the event loop call the other methods."""

    def post(self, what: Callable[..., None], *given) -> None: ...

    def ready(self) -> None:
        """The driver is there."""

    def lost(self, error: BaseException) -> None:
        """Nothing will run any more."""

    def turn_away(self, call: Call, code: str, rest: int) -> None:
        """Not all rows of a call could begin; so many of them never came."""

    def deliver(self, news: News) -> None:
        """Rows have new tokens, or are over."""


class EngineSteps:
    """Runs a driver's steps; `tell`, `stop` and attributes are for any thread.

    Args:
      load, close, observers: see `EngineThread`.
    Attributes:
      driver: once it is there; only for what may be read from another thread.
      seen: rows that calls have brought; generated: tokens.
    """

    def __init__(
        self,
        load: Callable[[], Driver],
        close: Callable[[Driver], None],
        observers: Observers,
        listener: Listener,
    ):
        self._load, self._close, self._observers = load, close, observers
        self._listener = listener
        self._inbox: deque[Callable[[Driver], None]] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._of: dict[Request, tuple[Call, int]] = {}
        self._news: News = {}
        self._is_urgent = False  # a first token or an end does not wait for more
        self._sent_s = -math.inf  # when it last handed over news
        self.driver: Driver | None = None
        self.seen = self.generated = 0

    def tell(self, do: Callable[[Driver], None]) -> None:
        """Has the thread call `do(driver)` between two steps."""
        with self._changed:
            self._inbox.append(do)
            self._changed.notify()

    def stop(self) -> None:
        """The thread ends after what it does now."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def run(self) -> None:
        """The thread: loads, serves until it is stopped, closes."""
        try:
            self.driver = driver = self._load()
            for observer in self._observers.all:
                observer.ready(driver)
        except BaseException as error:  # raised by whoever waits for it
            self._post(self._listener.lost, error)
            return
        self._post(self._listener.ready)
        try:
            self._serve(driver)
        except BaseException as error:
            self._post(self._listener.lost, error)
        self._do_what_was_asked(driver)  # a call that begins now leaves with the others
        for call in {call for call, _ in self._of.values()}:
            self.leave(driver, call)
        self._send()
        self._close(driver)

    def _post(self, what: Callable[..., None], *given) -> None:
        try:
            self._listener.post(what, *given)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._is_stopped = True

    def _serve(self, driver: Driver) -> None:
        failed = 0
        while not self._is_stopped:
            if self._do_what_was_asked(driver) or driver.has_prompts:
                self._send()  # a step with a prompt may take long
            stepped = driver.step()
            if stepped is not None:
                self._follow(driver, stepped)
                if stepped.k:  # it computed, or tried to
                    failed = failed + 1 if stepped.error else 0
            self._send(may_wait=stepped is not None)
            if failed == MOST_FAILED_STEPS:
                raise EngineLostError(
                    f"{failed} steps in a row failed, the last one by "
                    f"{type(stepped.error).__name__}; see above"
                )
            if stepped is None:
                self._rest(driver.wake_s - driver.clock())

    def _do_what_was_asked(self, driver: Driver) -> bool:
        """Whether there was anything."""
        was_asked = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()(driver)
        return was_asked

    def _rest(self, seconds: float) -> None:
        with self._changed:
            if not self._inbox and not self._is_stopped:
                limit = None if seconds == math.inf else max(seconds, 0.0)
                self._changed.wait(limit)

    def begin(self, driver: Driver, call: Call) -> None:
        """Submits all rows of a call; if one cannot begin, all leave."""
        self.seen += len(call.rows)
        for index, row in enumerate(call.rows):
            try:
                driver.submit(row, call.arrival_s)
            except MoeEdgeError as error:  # whoever checked the request let it through
                report(error)
                code = "engine_error"
            else:
                self._of[row] = call, index
                if row.state != "refused":
                    continue
                code, index = "queue_full", index + 1
            self.leave(driver, call)
            rest = len(call.rows) - index
            return self._post(self._listener.turn_away, call, code, rest)

    def leave(self, driver: Driver, call: Call) -> None:
        """All rows of a call leave."""
        for index, row in enumerate(call.rows):
            if self._of.pop(row, None):
                driver.cancel(row)  # nothing, if it was refused
                self._news[call, index] = self._is_urgent = True

    def _follow(self, driver: Driver, stepped: Stepped) -> None:
        """Sorts a step's news by calls."""
        self.generated += len(stepped.tokens)
        for row, *_ in stepped.tokens:
            found = self._of.get(row)
            if found is not None and found[0].body.stream:
                self._news[found] = False
                self._is_urgent |= row.made == 1
        for row in stepped.ended:
            self._news[self._of.pop(row)] = self._is_urgent = True
        if stepped.error is not None:
            report(stepped.error)
        if stepped.k:
            self._observers.tell("stepped", driver, stepped)

    def _send(self, may_wait: bool = False) -> None:
        """Hands over the news; `may_wait`: later, if more will come soon."""
        now_s = time.monotonic()
        if may_wait and not self._is_urgent and now_s < self._sent_s + TELL_S:
            return
        news, self._news, self._is_urgent = self._news, {}, False
        if news:
            self._sent_s = now_s
            self._post(self._listener.deliver, news)
