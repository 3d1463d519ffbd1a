"""Requests for tokens as they run: the request loop decides, row slots compute.

    driver = Driver(slots, loop)
    live = driver.submit(RowRequest(prompt=(1, 2, 3), max_new_tokens=20, floor=8))
    while driver.is_busy:
        stepped = driver.step()          # or None: rest until `wake_s` or an event

It has no thread, socket or text: whoever owns it (the server's engine thread, the load
generator) calls it from one thread, and reads text out of tokens by `RowRequest.ends`.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from moe_edge.engine.expert_state import Moved
from moe_edge.engine.slot_rows import Row
from moe_edge.engine.slots import RowSlots
from moe_edge.model.new_token import Guide, NewToken, Score
from moe_edge.model.sampling import Sampling
from moe_edge.schedule.figures import Served
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import RUNNING
from moe_edge.schedule.token_job import TokenJob
from moe_edge.serve.errors import report


def _never(new: NewToken) -> None:
    """A row that runs as long as it may."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRequest:
    """A row that somebody asked for.

    Attributes:
      prompt: token ids, at least one; max_new_tokens: 0 after two or more, else at
        least 1. With 0 the last token of the prompt is only scored, so that a prompt
        may fill the context.
      floor: fewest experts a token.
      top_logprobs, score_prompt: as of `slot_rows.Row`.
      deadline_s: on the driver's clock; None: never.
      guide: of the tokens that are drawn, of this row alone.
      ends: is told each new token; the reason if the row ends with it (`eos`, `stop`).
        What it raises fails this row alone.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    floor: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    top_logprobs: int | None = None
    score_prompt: bool = False
    deadline_s: float | None = None
    guide: Guide | None = None
    ends: Callable[[NewToken], str | None] = _never


@dataclasses.dataclass(eq=False)
class Live:
    """A request on its way, and what became of it.

    Attributes:
      served: its times, tokens and K.
      ended_by: `eos`, `stop`, `length` or `deadline`, of one that finished.
      cached_tokens: of its prompt, that the prompt cache spared.
      prompt_scores: of the prompt's tokens from the second on, if asked for.
      moved_bytes: its share of what steps moved to the device.
      routed, substituted: its share of the experts that steps chose under a lossy
        route, and of those that were others than the router's.
    """

    asked: RowRequest
    job: TokenJob
    served: Served
    ended_by: str | None = None
    cached_tokens: int = 0
    prompt_scores: list[Score] = dataclasses.field(default_factory=list)
    moved_bytes: float = 0.0
    routed: float = 0.0
    substituted: float = 0.0

    @property
    def outcome(self) -> str | None:
        """One of `policy.OUTCOMES`; None as long as it is open."""
        return self.served.outcome or None


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

    tokens: list[tuple[Live, NewToken, float]]
    ended: list[Live]
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
        self._live: dict[int, Live] = {}
        self._moved: Moved | None = None  # up to the last step
        self.num_steps = 0  # that computed something, or tried to

    # Requests.

    def submit(self, asked: RowRequest, arrival_s: float | None = None) -> Live:
        """A request comes; refused at once if there is no room for it.

        Args:
          arrival_s: when it came, if not now: while a step ran, perhaps.
        Raises:
          RequestError, CapacityError: what no step could run (`RowSlots.check`).
        """
        now_s = self.clock()
        arrival_s = now_s if arrival_s is None else arrival_s
        id = next(self._ids)
        self.slots.check(self._row(id, asked, asked.floor))
        job = TokenJob(
            id,
            arrival_s=arrival_s,
            floor=asked.floor,
            deadline_s=asked.deadline_s,
            kv_bytes=self.slots.row_bytes(len(asked.prompt) + asked.max_new_tokens),
            prompt_tokens=len(asked.prompt),
            new_tokens=max(asked.max_new_tokens, 1),  # of 0, the prompt's last
        )
        live = Live(asked, job, Served(arrival_s, asked.floor))
        lane = self.loop.arrive(job, now_s)
        if lane is None:
            live.served.outcome = job.state
        else:
            self._live[job.id] = live
            self.loop.admit(job, lane, now_s)
        return live

    def cancel(self, live: Live) -> None:
        """Nobody waits for a request any more; nothing if it is over."""
        if self.loop.cancel(live.job.id) is not None:
            self._end(live)

    @property
    def is_busy(self) -> bool:
        """Whether a request is open."""
        return bool(self._live)

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
        ended = [self._live[job.id] for job in self.loop.expire(now_s)]
        for live in ended:
            if live.job.state == "finished":
                live.ended_by = "deadline"
            self._end(live)
        running = self.loop.begin_step(0, now_s)
        pick_s = self.clock() - now_s
        if not running:
            return Stepped([], ended) if ended else None
        self.num_steps += 1
        rows = [self._live[job.id] for job in running]
        failed, stepped = [], Stepped([], ended)
        self._moved = self._moved or self.slots.engine.moved()
        try:
            tokens, decode_s, prefill_s = self._compute(rows, now_s)
        except Exception as error:  # of any kind: the server lives on
            self.slots.clear()
            failed, stepped = rows, stepped._replace(error=error)
        else:
            for live, new, time_s in tokens:
                try:
                    self._add(live, new, time_s)
                except Exception as error:  # in `ends`, which is of this row alone
                    report(error)
                    failed.append(live)
            stepped = Stepped(tokens, ended, pick_s, decode_s, prefill_s)
        self._share(rows)
        finished = [live.job for live in rows if live.ended_by]
        self.loop.end_step(0, self.clock(), finished, [live.job for live in failed])
        over = [live for live in rows if live.job.state != RUNNING]
        for live in over:
            self._end(live)
        ks = tuple(live.job.k for live in rows)
        return stepped._replace(ended=ended + over, k=ks)

    def _compute(self, rows: list[Live], now_s: float):
        """(new tokens, seconds of decoding, of prompts)."""
        if self.num_steps == self._fail_step:
            raise RuntimeError(f"step {self.num_steps} fails, as fail_step asks")
        self._follow(rows, now_s)
        tokens: list[tuple[Live, NewToken, float]] = []
        times = [self.clock()]
        for half in (self.slots.decode, self.slots.prefill):
            news = half()
            times.append(self.clock())
            for new in news:
                live = self._live[new.id]
                if new.is_forced and live.asked.score_prompt:
                    live.prompt_scores.append(new.score)
                if self.slots[new.id].emitted >= min(live.asked.max_new_tokens, 1):
                    tokens.append((live, new, times[-1]))
        begun, decoded, through = times
        return tokens, decoded - begun, through - decoded

    def _share(self, rows: list[Live]) -> None:
        """What moved since the last step belongs to its rows, in equal parts."""
        before, self._moved = self._moved, self.slots.engine.moved()
        demand, prefetch, _, chosen, changed = (
            (now - then) / len(rows)
            for now, then in zip(self._moved, before, strict=True)
        )
        for live in rows:
            live.moved_bytes += demand + prefetch
            live.routed += chosen
            live.substituted += changed

    def _follow(self, rows: list[Live], now_s: float) -> None:
        """Does what the policy decided: who joins, at which K."""
        joining = [live for live in rows if live.served.admitted_s is None]
        for live in joining:
            live.served.admitted_s = now_s
        self.slots.admit(
            [self._row(live.job.id, live.asked, live.job.k) for live in joining]
        )
        for live in rows:
            self.slots.set_k(live.job.id, live.job.k)

    def _row(self, id: int, asked: RowRequest, k: int) -> Row:
        """The row of a request; prompts are scored as the engine decodes.

        A lossy route changes what is decoded, not what prompts compute.
        """
        by_token = asked.score_prompt and not self.slots.engine.lossless
        given = asked.prompt[:1] if by_token else asked.prompt
        if not asked.max_new_tokens:
            given = given[: len(asked.prompt) - 1]
        return Row(
            id=id,
            prompt=given,
            forced=asked.prompt[len(given) :],
            max_new_tokens=asked.max_new_tokens,
            k=k,
            sampling=asked.sampling,
            top_logprobs=asked.top_logprobs,
            score_prompt=asked.score_prompt and not by_token,
            guide=asked.guide,
        )

    def _add(self, live: Live, new: NewToken, time_s: float) -> None:
        if not live.job.made:
            row = self.slots[live.job.id]
            live.cached_tokens = row.cached
            live.prompt_scores[:0] = row.prompt_scores
        live.served.add(time_s, live.job.k)
        live.job.made += 1
        live.ended_by = live.asked.ends(new)
        if live.ended_by is None and not live.job.left:
            live.ended_by = "length"

    def _end(self, live: Live) -> None:
        live.served.outcome = live.job.state
        del self._live[live.job.id]
        if live.job.id in self.slots.ids:
            self.slots.release(live.job.id)
