"""The one thread that computes, as the event loop sees it: it asks and listens.

    thread = EngineThread(load)              # load() -> Driver runs in the thread
    thread.start()                           # from within the event loop
    thread.submit(call)
    while not call.is_over:
        for index, is_over in (await call.news()).items():
            ...                              # what `call.texts[index]` has of it

All of it runs on the event loop; the thread itself is `EngineSteps`.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from moe_edge.serve.call import Call
from moe_edge.serve.driver import Driver
from moe_edge.serve.engine_steps import EngineSteps, News
from moe_edge.serve.errors import ApiError, bad_value, refusal
from moe_edge.serve.observers import Observer, Observers

LOADING, OK, DRAINING, FAILED = "loading", "ok", "draining", "failed"
T = TypeVar("T")


class EngineThread:
    """Runs a driver's steps, and hands over what they give.

    Args:
      load: makes the driver, ready to run; closed by `close(driver)` at the end.
      observers: are told of steps and ends.
    Attributes:
      state: loading, ok, draining or failed.
      steps: what it runs.
      refused: requests that were refused before the driver saw them.
      error: why the state is failed.
    """

    def __init__(
        self,
        load: Callable[[], Driver],
        close: Callable[[Driver], None] = lambda driver: None,
        observers: Sequence[Observer] = (),
    ):
        self.observers = Observers(observers)
        self.steps = EngineSteps(load, close, self.observers, self)
        self._asked = 0  # rows
        self._open: set[Call] = set()
        self._coming = 0  # requests whose bodies are being parsed or tokenised
        self.state, self.refused = LOADING, 0
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begins to load; from within the event loop that will listen."""
        self._loop = asyncio.get_running_loop()
        self.is_loaded = asyncio.Event()  # or failed
        self.is_failed = asyncio.Event()
        self._is_quiet = asyncio.Event()  # no call is open
        self._is_quiet.set()
        self._thread = threading.Thread(
            target=self.steps.run, name="engine", daemon=True
        )
        self._thread.start()

    # What the event loop asks for.

    @property
    def driver(self) -> Driver | None:
        """Once it is there; only for what may be read from this thread."""
        return self.steps.driver

    @property
    def num_waiting(self) -> int:
        queued = self.driver.num_waiting if self.driver else 0
        return self._asked - self.steps.seen + queued

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
            raise bad_value(
                "n",
                f"{count} choices of one request, expected at most {most}: what this "
                "server runs and lets wait; send several requests",
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

    def submit(self, call: Call) -> None:
        """Asks for rows; all of them begin, or all are refused.

        Raises: as `check_open`.
        """
        self.check_open(call.endpoint, len(call.rows))
        self._open.add(call)
        self._is_quiet.clear()
        self._asked += len(call.rows)
        self.steps.tell(lambda driver: self.steps.begin(driver, call))

    def cancel(self, call: Call) -> None:
        """Nobody listens to a call any more."""
        if call in self._open:
            self.steps.tell(lambda driver: self.steps.leave(driver, call))

    async def ask(self, what: Callable[[Driver], T]) -> T:
        """`what(driver)`, called on the engine's thread between two steps.

        Raises:
          ApiError: loading, engine_failed.
        """
        if self.driver is None or self.state == FAILED:
            code = "loading" if self.state == LOADING else "engine_failed"
            raise refusal(code)
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def do(driver: Driver) -> None:
            if not answer.set_running_or_notify_cancel():  # nobody waits any more
                return
            try:
                answer.set_result(what(driver))
            except Exception as error:
                answer.set_exception(error)

        self.steps.tell(do)
        return await asyncio.wrap_future(answer)

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
        self.steps.stop()
        await asyncio.to_thread(self._thread.join)
        self._lose_all("draining")

    def summary(self) -> dict[str, Any]:
        """`requests` (all that came), `outcomes` and `generated_tokens` so far."""
        outcomes = dict(self.driver.loop.outcomes) if self.driver else {}
        outcomes["refused"] = outcomes.get("refused", 0) + self.refused
        return {
            "requests": sum(outcomes.values()),
            "outcomes": outcomes,
            "generated_tokens": self.steps.generated,
        }

    # What it is told: a `Listener`.

    def post(self, what: Callable[..., None], *given) -> None:
        """From the engine's thread; RuntimeError once the event loop is closed."""
        self._loop.call_soon_threadsafe(what, *given)

    def ready(self) -> None:
        if self.state == LOADING:
            self.state = OK
        self.is_loaded.set()

    def lost(self, error: BaseException) -> None:
        self.state, self.error = FAILED, error
        self._lose_all("engine_failed")
        self.is_failed.set()
        self.is_loaded.set()

    def _lose_all(self, code: str) -> None:
        for call in [*self._open]:
            call.lose(code)
        self._open.clear()
        self._is_quiet.set()

    def turn_away(self, call: Call, code: str, rest: int) -> None:
        call.lose(code)
        self._open.discard(call)
        self.refuse(call.endpoint, code, rest)

    def deliver(self, news: News) -> None:
        for (call, index), is_over in news.items():
            call.tell(index, is_over)
            if is_over:
                self.observers.tell("ended", call.endpoint, call.rows[index])
                if not call.num_left:
                    self._open.discard(call)
        if not self._open:
            self._is_quiet.set()
