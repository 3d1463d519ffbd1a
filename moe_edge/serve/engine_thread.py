"""The one thread that computes: it owns the driver, the event loop asks and listens.

    thread = EngineThread(load)              # load() -> Driver runs in the thread
    thread.start()                           # from within the event loop
    call = thread.submit([row], "/v1/completions", thread.clock())
    while not call.is_over:
        for row, is_over in (await call.news()).items():
            ...                              # what its `Request.ends` has kept of it

Everything but `_run` and what it calls runs on the event loop. A step wakes the loop
once at most, however many rows it has; steps that follow each other fast do so once for
several, unless a row begins or ends.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from moe_edge.core.checks import MoeEdgeError
from moe_edge.schedule.request import Request
from moe_edge.serve.call import Call, refusal, settle
from moe_edge.serve.call_rows import CallRows, News
from moe_edge.serve.driver import Driver, Stepped
from moe_edge.serve.errors import ApiError, report
from moe_edge.serve.observers import Observer, Observers

LOADING, OK, DRAINING, FAILED = "loading", "ok", "draining", "failed"
MOST_FAILED_STEPS = 3  # in a row
# Between two wake-ups of the event loop for tokens alone: what they cost is taken from
# the cores that compute.
TELL_S = 0.01
T = TypeVar("T")


class EngineLostError(MoeEdgeError):
    """Steps fail again and again."""

    exit_code = 1


class EngineThread:
    """Runs a driver's steps, and hands over what they give.

    Args:
      load: makes the driver, ready to run; closed by `close(driver)` at the end.
      observers: are told of steps and ends.
    Attributes:
      state: loading, ok, draining or failed.
      driver: once it is there; only for what may be read from another thread.
      refused: requests that were refused before the driver saw them.
      error: why the state is failed.
    """

    def __init__(
        self,
        load: Callable[[], Driver],
        close: Callable[[Driver], None] = lambda driver: None,
        observers: Sequence[Observer] = (),
    ):
        self._load, self._close, self.observers = load, close, Observers(observers)
        self._inbox: deque[Callable[[Driver], None]] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._asked = self._seen = 0  # rows, by the event loop and by the driver
        self._open: set[Call] = set()
        self._coming = 0  # requests whose bodies are being parsed or tokenised
        self._rows = CallRows()  # of the engine thread, as the next one
        self._sent_s = -math.inf  # when it last handed over news
        self.state, self.refused = LOADING, 0
        self.driver: Driver | None = None
        self.generated = 0  # tokens
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begins to load; from within the event loop that will listen."""
        self._loop = asyncio.get_running_loop()
        self.is_loaded = asyncio.Event()  # or failed
        self.is_failed = asyncio.Event()
        self._is_quiet = asyncio.Event()  # no call is open
        self._is_quiet.set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # What the event loop asks for.

    @property
    def num_waiting(self) -> int:
        queued = self.driver.num_waiting if self.driver else 0
        return self._asked - self._seen + queued

    @property
    def num_running(self) -> int:
        return self.driver.num_running if self.driver else 0

    def check_open(self, endpoint: str, count: int = 1) -> None:
        """Whether requests can come now: before work is put into them.

        Counts as the loop does, so that all rows of a call begin.

        Raises:
          ApiError: loading, draining, engine_failed, queue_full; invalid_value: more
            rows than may ever be open.
        """
        if self.state != OK:
            codes = {LOADING: "loading", DRAINING: "draining"}
            raise self.refuse(endpoint, codes.get(self.state, "engine_failed"), count)
        loop = self.driver.loop
        if loop.limits.max_waiting is None:
            return
        most = loop.limits.max_waiting + loop.policy.max_batch
        if count > most:
            raise ApiError(
                "invalid_value",
                f"{count} choices of one request, expected at most {most}: what this "
                "server runs and lets wait; send several requests",
                param="n",
            )
        there = self._coming + sum(call.num_left for call in self._open)
        if there + count > most:
            raise self.refuse(endpoint, "queue_full", count)

    @contextlib.contextmanager
    def coming(self, endpoint: str) -> Iterator[None]:
        """While a body is read its request counts as one that waits: as one row.

        Raises: as `check_open`.
        """
        self.check_open(endpoint)
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1

    def refuse(self, endpoint: str, code: str, count: int = 1) -> ApiError:
        """Counts requests that do not reach the driver; what they are answered with."""
        self.refused += count
        self.observers.tell("refused", endpoint, count)
        return refusal(code)

    def clock(self) -> float:
        """Seconds, the driver's; once it is there."""
        return self.driver.clock()

    def submit(
        self,
        rows: Sequence[Request],
        endpoint: str,
        arrival_s: float,
        with_tokens: bool = True,
    ) -> Call:
        """Asks for rows; all of them begin, or all are refused.

        Args:
          arrival_s: when the request came.
          with_tokens: whether tokens are news, or ends only.
        Raises: as `check_open`.
        """
        self.check_open(endpoint, len(rows))
        call = Call(rows, endpoint, arrival_s, with_tokens)
        self._open.add(call)
        self._is_quiet.clear()
        self._asked += len(rows)
        self._tell(lambda driver: self._begin(driver, call))
        return call

    def cancel(self, call: Call) -> None:
        """Nobody listens to a call any more."""
        if call in self._open:
            self._tell(lambda driver: self._rows.leave(driver, call))

    async def ask(self, what: Callable[[Driver], T]) -> T:
        """`what(driver)`, called on the engine's thread between two steps.

        Raises:
          ApiError: loading, engine_failed.
        """
        if self.driver is None or self.state == FAILED:
            code = "loading" if self.state == LOADING else "engine_failed"
            raise refusal(code)
        answer = self._loop.create_future()

        def do(driver: Driver) -> None:
            try:
                self._post(settle, answer, what(driver), None)
            except Exception as error:
                self._post(settle, answer, None, error)

        self._tell(do)
        return await answer

    async def drain(self, drain_s: float) -> None:
        """Takes nothing on any more, and lets what is open end within a time."""
        if self.state in (OK, LOADING):
            self.state = DRAINING
        try:
            async with asyncio.timeout(drain_s):
                await self._is_quiet.wait()
        except TimeoutError:
            for call in [*self._open]:
                call.lose("draining")
                self.cancel(call)

    async def stop(self) -> None:
        """Ends the thread after what it does now; all open calls are lost."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        self._lose_all("draining")

    def summary(self) -> dict[str, Any]:
        """`requests` (all that came), `outcomes` and `generated_tokens` so far."""
        outcomes = dict(self.driver.loop.outcomes) if self.driver else {}
        outcomes["refused"] = outcomes.get("refused", 0) + self.refused
        return {
            "requests": sum(outcomes.values()),
            "outcomes": outcomes,
            "generated_tokens": self.generated,
        }

    def _tell(self, do: Callable[[Driver], None]) -> None:
        with self._changed:
            self._inbox.append(do)
            self._changed.notify()

    # What it is told, on the event loop.

    def _ready(self) -> None:
        if self.state == LOADING:
            self.state = OK
        self.is_loaded.set()

    def _lost(self, error: BaseException) -> None:
        self.state, self.error = FAILED, error
        self._lose_all("engine_failed")
        self.is_failed.set()
        self.is_loaded.set()

    def _lose_all(self, code: str) -> None:
        for call in [*self._open]:
            call.lose(code)
        self._open.clear()
        self._is_quiet.set()

    def _turn_away(self, call: Call, code: str, rest: int) -> None:
        """Not all rows of a call could begin; so many of them never came."""
        call.lose(code)
        self._open.discard(call)
        self.refuse(call.endpoint, code, rest)

    def _deliver(self, news: News) -> None:
        for (call, index), is_over in news.items():
            call.tell(index, is_over)
            if is_over:
                self.observers.tell("ended", call.endpoint, call.rows[index])
                if not call.num_left:
                    self._open.discard(call)
        if not self._open:
            self._is_quiet.set()

    # The engine thread.

    def _post(self, what: Callable, *given) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *given)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._is_stopped = True

    def _run(self) -> None:
        try:
            self.driver = driver = self._load()
            for observer in self.observers.all:
                observer.ready(driver)
        except BaseException as error:  # raised by whoever waits for it
            self._post(self._lost, error)
            return
        self._post(self._ready)
        try:
            self._serve(driver)
        except BaseException as error:
            self._post(self._lost, error)
        self._do_what_was_asked(driver)  # a call that begins now leaves with the others
        self._rows.leave_all(driver)
        self._send()
        self._close(driver)

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

    def _send(self, may_wait: bool = False) -> None:
        """Hands over the news; `may_wait`: later, if more will come soon."""
        now_s = time.monotonic()
        if may_wait and not self._rows.is_urgent and now_s < self._sent_s + TELL_S:
            return
        if news := self._rows.take():
            self._sent_s = now_s
            self._post(self._deliver, news)

    def _rest(self, seconds: float) -> None:
        with self._changed:
            if not self._inbox and not self._is_stopped:
                limit = None if seconds == math.inf else max(seconds, 0.0)
                self._changed.wait(limit)

    def _begin(self, driver: Driver, call: Call) -> None:
        self._seen += len(call.rows)
        if (refused := self._rows.begin(driver, call)) is not None:
            self._post(self._turn_away, call, *refused)

    def _follow(self, driver: Driver, stepped: Stepped) -> None:
        self.generated += len(stepped.tokens)
        self._rows.follow(stepped)
        if stepped.error is not None:
            report(stepped.error)
        if stepped.k:
            self.observers.tell("stepped", driver, stepped)
