"""The request loop of token serving: what a step computes, and how far requests are.

A step is at most one chunk of prompts and one token of every row that decodes. Prompts
that were admitted together are prefilled together; the next ones begin when these are
done. A row decodes from the step after its prompt's last chunk, which gave its first
token. Engine, server and simulation in computed time all take their steps from here.
"""

import dataclasses
from collections.abc import Collection
from typing import ClassVar, NamedTuple

from moe_edge.core.checks import check_count
from moe_edge.schedule.loop import NO_LIMITS, Limits, RequestLoop
from moe_edge.schedule.policy import RUNNING, Job, SchedulePolicy


@dataclasses.dataclass(slots=True, eq=False)
class TokenJob(Job):
    """A request for tokens.

    Attributes:
      prompt_tokens: of its prompt, at least 1.
      new_tokens: most that it may get, at least 1.
      fed: tokens of the prompt that were computed; what a prompt cache holds of them is
        set before it is admitted and leaves at least one.
      made: new tokens so far.
    """

    GIVEN: ClassVar[tuple[str, ...]] = (*Job.GIVEN, "prompt_tokens", "new_tokens")

    prompt_tokens: int = 1
    new_tokens: int = 1
    fed: int = 0
    made: int = dataclasses.field(default=0, init=False)

    @property
    def left(self) -> int:
        """New tokens that it may still get."""
        return self.new_tokens - self.made


class Chunk(NamedTuple):
    """A part of a prompt: tokens start .. stop - 1 of a request."""

    job: TokenJob
    start: int
    stop: int


class Step(NamedTuple):
    """What a lane computes in one step.

    Attributes:
      chunks: of prompts, that pass the model together; each row at its job's K.
      decode: jobs that get one more token, each at its K.
    """

    chunks: list[Chunk]
    decode: list[TokenJob]


NO_STEP = Step([], [])


class TokenLoop(RequestLoop):
    """A request loop whose jobs are TokenJobs; it knows what each step computes.

    Attributes:
      steps: by lane, of the step that `begin_step` began.
      prefill_chunk: tokens of a prompt that pass the model at a time.
      prefill_rows: prompts that are prefilled together; 1: each alone.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        num_lanes: int = 1,
        limits: Limits = NO_LIMITS,
        *,
        prefill_chunk: int = 512,
        prefill_rows: int = 2**31,
    ):
        super().__init__(policy, num_lanes, limits)
        check_count("prefill_chunk", prefill_chunk)
        check_count("prefill_rows", prefill_rows)
        self.prefill_chunk, self.prefill_rows = prefill_chunk, prefill_rows
        self.steps = [NO_STEP] * num_lanes
        self._groups: list[list[TokenJob]] = [[] for _ in self.lanes]

    def begin_step(self, number: int, now_s: float):
        """As `RequestLoop.begin_step`; `steps[number]` says what is to be computed."""
        running = super().begin_step(number, now_s)
        group = [job for job in self._groups[number] if job.state == RUNNING]
        group = [job for job in group if not job.made]
        if not group:
            fresh = [job for job in running if not job.made]
            group = fresh[: self.prefill_rows]
        self._groups[number] = group
        chunks = [
            Chunk(job, job.fed, min(job.prompt_tokens, job.fed + self.prefill_chunk))
            for job in group
        ]
        self.steps[number] = Step(chunks, [job for job in running if job.made])
        return running

    def end_step(
        self,
        number: int,
        now_s: float,
        finished: Collection[Job] = (),
        failed: Collection[Job] = (),
    ) -> list[Job]:
        """As `RequestLoop.end_step`.

        Args:
          finished: those that ended before their last token, by a stop or the end of
            their text; the others are found here.
        """
        step, self.steps[number] = self.steps[number], NO_STEP
        for job, _, stop in step.chunks:
            job.fed = stop
            job.made = int(stop == job.prompt_tokens)
        for job in step.decode:
            job.made += 1
        lane = self.lanes[number]
        done = [job for job in lane.running if not job.left or job in finished]
        return super().end_step(number, now_s, done, failed)
