"""Requests for tokens as they run: the request loop decides, row slots compute.

    driver = Driver(slots, loop)
    driver.submit(Request(prompt=(1, 2, 3), new_tokens=20, floor=8))
    while driver.is_busy:
        stepped = driver.step()          # or None: rest until `wake_s` or an event

It has no thread, socket or text: whoever owns it (the server's engine thread, the load
generator) calls it from one thread, and reads text out of tokens by `Request.ends`.
"""

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from moe_edge.core.checks import RequestError
from moe_edge.engine.expert_state import Moved
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from moe_edge.model.new_token import NewToken
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import RUNNING
from moe_edge.schedule.request import Request
from moe_edge.serve.errors import report


class Stepped(NamedTuple):
    """What a step gave.

    Attributes:
      tokens: (request, token, when it was there), in order.
      ended: requests that are over, refused and cancelled ones excepted: whoever
        submits or cancels knows at once.
      pick_s: of choosing its rows; decode_s, prefill_s: of its two halves.
      k: of each row that ran in it.
      error: what the engine raised; all that ran has failed by it.
    """

    tokens: list[tuple[Request, NewToken, float]]
    ended: list[Request]
    pick_s: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    k: tuple[int, ...] = ()
    error: Exception | None = None


class Driver:
    """One engine that serves requests.

    Args:
      slots: of the engine, warmed up; nobody else uses them.
      loop: of one lane, or a recorder of it.
      clock: seconds.
      fail_step: a drill: the step of this number, from 1, raises.
    """

    def __init__(
        self,
        slots: RowSlots,
        loop: RequestLoop,
        clock: Callable[[], float] = time.monotonic,
        fail_step: int | None = None,
    ):
        self.slots, self.loop, self.clock = slots, loop, clock
        self._fail_step, self._ids = fail_step, itertools.count()
        self._open: dict[int, Request] = {}
        self._moved: Moved | None = None  # up to the last step
        self.num_steps = 0  # that computed something, or tried to

    # Requests.

    def submit(self, request: Request, arrival_s: float | None = None) -> Request:
        """A request comes; refused at once if there is no room for it.

        Args:
          request: a new one; nobody but the driver writes it from here on.
          arrival_s: when it came, if not now: while a step ran, perhaps.
        Raises:
          RequestError, CapacityError: what no step could run (`RowSlots.check`), or a
            request that was submitted before.
        """
        if request.state != "new":
            raise RequestError("a request is submitted once; make another one of it")
        now_s = self.clock()
        request.id = next(self._ids)
        request.arrival_s = now_s if arrival_s is None else arrival_s
        row = self._row(request, request.floor)
        self.slots.check(row)
        request.kv_bytes = self.slots.row_bytes(row.need)
        lane = self.loop.arrive(request, now_s)
        if lane is not None:
            self._open[request.id] = request
            self.loop.admit(request, lane, now_s)
        return request

    def cancel(self, request: Request) -> None:
        """Nobody waits for a request any more; nothing if it is over."""
        if self.loop.cancel(request.id) is not None:
            self._end(request)

    @property
    def is_busy(self) -> bool:
        """Whether a request is open."""
        return bool(self._open)

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt of an admitted request is on its way."""
        return self.slots.has_prompts

    @property
    def num_waiting(self) -> int:
        return self.loop.num_waiting

    @property
    def num_running(self) -> int:
        return len(self.loop.lanes[0].running)

    @property
    def wake_s(self) -> float:
        """When to call `step` again after it gave None and if nothing happens."""
        return self.loop.wake_s(0)

    # Steps.

    def step(self) -> Stepped | None:
        """One token of all that run, and a chunk of prompts; None if there is nothing.

        An error of the engine ends all that runs, and is told instead of raised: the
        next step begins with fresh caches.
        """
        now_s = self.clock()
        ended = [self._open[job.id] for job in self.loop.expire(now_s)]
        for request in ended:
            if request.state == "finished":
                request.ended_by = "deadline"
            self._end(request)
        rows = [self._open[job.id] for job in self.loop.begin_step(0, now_s)]
        pick_s = self.clock() - now_s
        if not rows:
            return Stepped([], ended) if ended else None
        self.num_steps += 1
        failed, stepped = [], Stepped([], ended)
        self._moved = self._moved or self.slots.engine.moved()
        try:
            tokens, decode_s, prefill_s = self._compute(rows, now_s)
        except Exception as error:  # of any kind: the server lives on
            self.slots.clear()
            failed, stepped = rows, stepped._replace(error=error)
        else:
            for request, new, time_s in tokens:
                try:
                    self._add(request, new, time_s)
                except Exception as error:  # in `ends`, which is of this row alone
                    report(error)
                    failed.append(request)
            stepped = Stepped(tokens, ended, pick_s, decode_s, prefill_s)
        self._share(rows)
        finished = [request for request in rows if request.ended_by]
        self.loop.end_step(0, self.clock(), finished, failed)
        over = [request for request in rows if request.state != RUNNING]
        for request in over:
            self._end(request)
        ks = tuple(request.k for request in rows)
        return stepped._replace(ended=ended + over, k=ks)

    def _compute(self, rows: list[Request], now_s: float):
        """(new tokens, seconds of decoding, of prompts)."""
        if self.num_steps == self._fail_step:
            raise RuntimeError(f"step {self.num_steps} fails, as fail_step asks")
        self._follow(rows, now_s)
        tokens: list[tuple[Request, NewToken, float]] = []
        times = [self.clock()]
        for half in (self.slots.decode, self.slots.prefill):
            news = half()
            times.append(self.clock())
            for new in news:
                request = self._open[new.id]
                if new.is_forced and request.score_prompt:
                    request.prompt_scores.append(new.score)
                if self.slots[new.id].emitted >= int(not request.only_scored):
                    tokens.append((request, new, times[-1]))
        begun, decoded, through = times
        return tokens, decoded - begun, through - decoded

    def _share(self, rows: list[Request]) -> None:
        """What moved since the last step belongs to its rows, in equal parts."""
        before, self._moved = self._moved, self.slots.engine.moved()
        demand, prefetch, _, chosen, changed = (
            (now - then) / len(rows)
            for now, then in zip(self._moved, before, strict=True)
        )
        for request in rows:
            request.moved_bytes += demand + prefetch
            request.routed += chosen
            request.substituted += changed

    def _follow(self, rows: list[Request], now_s: float) -> None:
        """Does what the policy decided: who joins, at which K."""
        joining = [request for request in rows if request.admitted_s is None]
        for request in joining:
            request.admitted_s = now_s
        self.slots.admit([self._row(request, request.k) for request in joining])
        for request in rows:
            self.slots.set_k(request.id, request.k)

    def _row(self, request: Request, k: int) -> SlotRow:
        """The row of a request; prompts are scored as the engine decodes.

        A lossy route changes what is decoded, not what prompts compute.
        """
        prompt = request.prompt
        by_token = request.score_prompt and not self.slots.engine.lossless
        given = prompt[:1] if by_token else prompt
        if request.only_scored:
            given = given[: len(prompt) - 1]
        return SlotRow(
            id=request.id,
            prompt=given,
            forced=prompt[len(given) :],
            max_new_tokens=0 if request.only_scored else request.new_tokens,
            k=k,
            sampling=request.sampling,
            top_logprobs=request.top_logprobs,
            score_prompt=request.score_prompt and not by_token,
            guide=request.guide,
        )

    def _add(self, request: Request, new: NewToken, time_s: float) -> None:
        if not request.made:
            row = self.slots[request.id]
            request.cached_tokens = row.cached
            request.prompt_scores[:0] = row.prompt_scores
        request.add(time_s)
        request.ended_by = request.ends(new)
        if request.ended_by is None and not request.left:
            request.ended_by = "length"

    def _end(self, request: Request) -> None:
        del self._open[request.id]
        if request.id in self.slots.ids:
            self.slots.release(request.id)
