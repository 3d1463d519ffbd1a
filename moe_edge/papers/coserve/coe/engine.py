"""Serves requests for experts in real time: a thread each executor, one lock.

Requests come when they should (open loop), brought by the caller's thread. Who ends a
batch or brings a request decides what follows, under the lock; a thread then does what
it finds in its inbox: load, compute, judge.
"""

import gc
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.papers.coserve.coe.driver import ExpertDriver
from moe_edge.papers.coserve.coe.executor import Executor, Outcome
from moe_edge.papers.coserve.coe.results import CoeRun, CoeStep
from moe_edge.papers.coserve.coe.serving import Batch
from moe_edge.papers.coserve.coe.setup import Setup
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest


class RealTime:
    """Seconds from the first arrival, and what threads wait for."""

    inbox = queue.SimpleQueue  # with `put` and `get`, which waits

    def __init__(self):
        self._woken = threading.Event()

    def start(self, first_s: float) -> None:
        """The time is `first_s`."""
        self._zero_s = time.perf_counter() - first_s

    def now(self) -> float:
        return time.perf_counter() - self._zero_s

    def sleep_until(self, at_s: float) -> None:
        left_s = at_s - self.now()
        if left_s > 0:
            self._woken.wait(left_s)

    def wake(self) -> None:
        """Nobody sleeps any longer."""
        self._woken.set()


class ExpertEngine(ExpertDriver):
    """Serves requests once.

    Args:
      graph: of the experts; setup: of a policy, which the run uses up.
      executors: of each lane.
      images: of each request, float32 [H, W, 3]; or why there is none. Of a component
        without a rule nobody looks at it.
      clock: what tells the time and makes threads wait; tests compute it.
    """

    def __init__(
        self,
        graph: CoeGraph,
        setup: Setup,
        executors: Sequence[Executor],
        images: Sequence[np.ndarray | str],
        clock: Any = None,
    ):
        super().__init__(graph, setup)
        self._executors, self._images = executors, images
        self._clock = RealTime() if clock is None else clock
        self._inboxes = [self._clock.inbox() for _ in executors]
        self._over = self._clock.inbox()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, requests: Sequence[CoeRequest]) -> CoeRun:
        """Serves all requests, numbered by their places.

        Raises: whatever a thread died of.
        """
        self.requests, result = requests, self.result
        threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"executor-{lane}")
            for lane in range(len(self._executors))
        ]
        # What was there before is not looked through again and again. Who has frozen
        # what they keep finds it so: nobody can thaw the rest alone.
        freezes = not gc.get_freeze_count()
        if freezes:
            gc.collect()
            gc.freeze()
        self._clock.start(requests[0].arrival_s)
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            for number, request in enumerate(requests):
                self._clock.sleep_until(request.arrival_s)
                with self._lock:
                    if self._error is not None:
                        break
                    now_s = self._clock.now()
                    result.late_s.append(now_s - request.arrival_s)
                    self._arrive(number, now_s)
            with self._lock:
                self._check_over()
            self._over.get()
        finally:
            for inbox in self._inboxes:
                inbox.put(None)
            for thread in started:
                thread.join()
            if freezes:
                gc.unfreeze()
        if self._error is not None:
            raise self._error
        result.steps.sort(key=lambda step: step.begin_s)
        return result

    def _arrive(self, number: int, now_s: float) -> None:
        image = self._images[number]
        known = self.requests[number].component in self._graph.rules
        if known and isinstance(image, str):
            self.result.failed[number] = image
        else:
            super()._arrive(number, now_s)

    def _start(self, batch: Batch, now_s: float) -> None:
        self._inboxes[batch.lane].put((batch, now_s))

    def _work(self, lane: int) -> None:
        """The thread of a lane."""
        try:
            while (given := self._inboxes[lane].get()) is not None:
                batch, begin_s = given
                images = [self._images[job.id] for job in batch.jobs]
                outcome = self._executors[lane].run(batch, images)
                with self._lock:
                    self._take(batch, outcome, begin_s, self._clock.now())
        except BaseException as error:  # handed to the caller, which raises it
            self._error = error
            self._clock.wake()
            self._over.put(None)

    def _take(
        self, batch: Batch, outcome: Outcome, begin_s: float, now_s: float
    ) -> None:
        """What became of a batch."""
        failed = outcome.judged is None
        step = CoeStep(
            *(begin_s, now_s, outcome.load_s, batch.lane, batch.expert),
            *(len(batch.jobs), batch.tier, batch.leaving, failed),
        )
        self.result.steps.append(step)
        if failed:
            self._fail(batch, outcome.reason, now_s)
        else:
            self._end(batch, outcome.judged, now_s)
        self._check_over()

    def _check_over(self) -> None:
        ended = len(self.result.latency_s) + len(self.result.failed)
        if ended == len(self.requests):
            self._over.put(None)
