"""Token serving in computed time: the server's request loop over measured costs.

A step takes what its chunks of prompts and its rows cost (`hardware.step_costs`); the
loop takes no time: Python's is in the costs as far as the engine waits for it. Nothing
is taken from a prompt cache.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from moe_edge.core.clock import EventHeap
from moe_edge.engine.sizes import SlotSizes
from moe_edge.hardware.step_costs import Shape, StepCosts
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import RUNNING
from moe_edge.schedule.request import Request

ARRIVE, CANCEL, END, WAKE = range(4)


class Chunk(NamedTuple):
    """A part of a prompt: tokens start .. stop - 1 of a request."""

    job: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.job.prompt_tokens


class Step(NamedTuple):
    """What is computed between two decisions.

    Attributes:
      decode: jobs that get one more token.
      chunks: of prompts, that then pass the model together; the last one of a prompt
        gives its first token.
      batch: rows, 1 and capacity of the session in which they decode; None: unknown.
      shape: rows, size and capacity in which the chunks run, padding included.
      is_new: whether this step of the rows could not begin before the last one's
        tokens were told. is_moved: whether they move into another session, besides.
      in_vain_k: mean K of a step of the same rows that had begun at K of the past;
        None: there is none.
    """

    decode: list[Request]
    chunks: list[Chunk]
    batch: Shape | None = None
    shape: Shape | None = None
    is_new: bool = False
    is_moved: bool = False
    in_vain_k: float | None = None


class SlotSteps:
    """What `engine.slots.RowSlots` computes in a step, without a model.

    Row slots hear of a row that leaves before its last token a step later than this:
    one that had begun with it is taken all the same.

    Args:
      sizes: of its batch; None: of 8 rows of up to 4,096 tokens.
    """

    def __init__(self, sizes: SlotSizes | None = None):
        self._sizes = sizes or SlotSizes(
            max_rows=8, max_context=4096, prefill_chunk=512, prompt_rows=8
        )
        self._group: list[Chunk] = []  # the last chunk of each prompt on its way
        self._shape = 0, 0  # of their session: rows, capacity
        self._batch = 0, 0  # of the session of rows that decode
        self._told: dict[int, int] = {}  # id -> K of the rows of its last step
        self._had_prompts = False  # in the last step, so none has begun ahead of this

    def next(self, running: Sequence[Request]) -> Step:
        """The step of admitted requests."""
        decode = [job for job in running if job.made]
        told, before = {job.id: job.k for job in decode}, self._told
        stays = told.keys() == before.keys() and not self._had_prompts
        had, self._had_prompts = self._batch, len(decode) < len(running)
        batch = self._decode(decode, told, self._had_prompts)
        is_moved = batch is not None and self._batch != had
        is_new = is_moved or not stays
        in_vain_k = None if is_new or told == before else _mean(before)
        shape = self._chunks(running)
        through = [chunk.job for chunk in self._group if chunk.is_last]
        if through:
            self._batch = self._size([*decode, *through])
        return Step(decode, self._group, batch, shape, is_new, is_moved, in_vain_k)

    def _size(self, rows: Sequence[Request]) -> tuple[int, int]:
        need = max(job.prompt_tokens + job.made for job in rows)
        return self._sizes.rows_for(len(rows)), self._sizes.capacity_for(need)

    def _decode(
        self, rows: Sequence[Request], told: dict[int, int], has_prompts: bool
    ) -> Shape | None:
        """The session of rows that decode.

        As in `SlotBatch` it grows with them, and shrinks only if they have changed and
        no prompt is on its way.
        """
        if not rows:
            return None
        size = self._size(rows)
        if size[1] > self._batch[1] or (told != self._told and not has_prompts):
            self._batch = size
        self._told = told
        return self._batch[0], 1, self._batch[1]

    def _chunks(self, running: Sequence[Request]) -> Shape | None:
        """The next chunks of prompts, and their shape."""
        sizes = self._sizes
        group = [(job, stop) for job, _, stop in self._group if job.state == RUNNING]
        group = [(job, stop) for job, stop in group if stop < job.prompt_tokens]
        if not group:
            waiting = [job for job in running if not job.made]
            lengths = [job.prompt_tokens for job in waiting]
            count = sizes.prompts_together(lengths) if waiting else 0
            group = [(job, 0) for job in waiting[:count]]
            rows = sizes.prompt_rows_for(count)
            longest = max(lengths[:count], default=1)
            self._shape = rows, sizes.prompt_capacity_for(longest)
        self._group = [
            Chunk(job, done, min(done + sizes.chunk, job.prompt_tokens))
            for job, done in group
        ]
        if not group:
            return None
        rows, capacity = self._shape
        widest = max(stop - start for _, start, stop in self._group)
        return rows, sizes.padded(widest, capacity), capacity


class ComputedServer:
    """One engine that serves requests in computed time.

    Args:
      loop: of one lane, or a recorder of it; costs: of its engine's steps.
      steps: what the engine computes in one; None: `SlotSteps` as they are by default.
      answers: id -> tokens after which a request's text ends; others run as long as
        they may.
      watch: is told (loop, step, seconds) as a step begins; None: nobody.

    Attributes:
      served: id -> request, of all that it was given.
      num_steps: so far; busy_s: seconds of them.
    """

    def __init__(
        self,
        loop: RequestLoop,
        costs: StepCosts,
        *,
        steps: SlotSteps | None = None,
        answers: Mapping[int, int] | None = None,
        watch: Callable[[RequestLoop, Step, float], None] | None = None,
    ):
        self.loop, self.costs = loop, costs
        self._steps, self._answers = steps or SlotSteps(), answers or {}
        self._watch = watch
        self.served: dict[int, Request] = {}
        self.num_steps, self.busy_s = 0, 0.0
        self._step, self._decoded_s = Step([], []), 0.0

    def run(
        self, jobs: Iterable[Request], cancelled: Mapping[int, float] | None = None
    ) -> dict[int, Request]:
        """Serves all requests.

        Args:
          cancelled: id -> seconds at which a request's client goes away.
        """
        heap, loop = EventHeap(), self.loop
        for job in jobs:
            self.served[job.id] = job
            heap.push(job.arrival_s, ARRIVE, 0, job.id)
        for number, time_s in (cancelled or {}).items():
            heap.push(time_s, CANCEL, 0, number)
        while heap:
            now_s, kind, _, item = heap.pop()
            self._handle(now_s, kind, item)
            next_s = heap.entries[0][0] if heap else math.inf
            if next_s == now_s:
                continue  # all that happens at once is seen at once
            loop.expire(now_s)
            if not loop.lanes[0].stepping and not self._begin(now_s, heap):
                wake_s = loop.wake_s(0)
                if wake_s < next_s:
                    heap.push(wake_s, WAKE)
        return self.served

    def _handle(self, now_s: float, kind: int, item: int) -> None:
        if kind == ARRIVE:
            job = self.served[item]
            lane = self.loop.arrive(job, now_s)
            if lane is not None:
                self.loop.admit(job, lane, now_s)
        elif kind == CANCEL:
            self.loop.cancel(item)
        elif kind == END:
            self._end(now_s)

    def _begin(self, now_s: float, heap: EventHeap) -> bool:
        """A step begins, if there is anything to do."""
        running = self.loop.begin_step(0, now_s)
        step = self._step = self._steps.next(running)
        if self._watch:
            self._watch(self.loop, step, now_s)
        if not running:
            return False
        for job in running:
            if job.admitted_s is None:
                job.admitted_s = now_s
        self._decoded_s = now_s + decode_s(step, self.costs)
        end_s = self._decoded_s + chunks_s(step, self.costs)
        self.num_steps, self.busy_s = self.num_steps + 1, self.busy_s + end_s - now_s
        heap.push(end_s, END)
        return True

    def _end(self, now_s: float) -> None:
        decode, chunks, *_ = self._step
        tokens = [(job, self._decoded_s) for job in decode]
        tokens += [(chunk.job, now_s) for chunk in chunks if chunk.is_last]
        ended = []
        for job, time_s in tokens:
            if job.state == RUNNING:
                job.add(time_s)
                if job.made == self._answers.get(job.id, job.new_tokens):
                    ended.append(job)
        self.loop.end_step(0, now_s, ended)


def chunks_s(step: Step, costs: StepCosts) -> float:
    """Seconds of the chunks of a step."""
    sizes = [stop - start for _, start, stop in step.chunks]
    if not sizes:
        return 0.0
    tokens = sum(sizes)
    pairs = sum(n * job.k for n, (job, *_) in zip(sizes, step.chunks, strict=True))
    seconds = costs.prefill_s(tokens, pairs / tokens, step.shape, len(sizes))
    keys = sum(n * start for n, (_, start, _) in zip(sizes, step.chunks, strict=True))
    return seconds + costs.prompt_key_s * keys


def decode_s(step: Step, costs: StepCosts) -> float:
    """Seconds of one token of a step's rows."""
    if not step.decode:
        return 0.0
    rows = len(step.decode)
    mean_k = sum(job.k for job in step.decode) / rows
    seconds = costs.decode_s(rows, mean_k, step.batch)
    keys = sum(job.prompt_tokens + job.made for job in step.decode)
    seconds = max(seconds + costs.key_s * (keys - rows * costs.keys), 0.0)
    if step.in_vain_k is not None and costs.runs_ahead:
        # Python tells the device of the new K while the old step still runs.
        in_vain_s = costs.decode_s(rows, step.in_vain_k, step.batch)
        seconds += max(in_vain_s, costs.changed_s)
    elif step.is_new or step.in_vain_k is not None:
        seconds += costs.changed_s
    return seconds + (costs.moved_s if step.is_moved else 0.0)


def _mean(ks: Mapping[int, int]) -> float:
    return sum(ks.values()) / len(ks)
