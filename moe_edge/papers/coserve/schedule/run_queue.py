"""A queue of requests for experts, as runs of one expert, with an index by expert.

A request is placed, found and taken in time that does not grow with the queue: a place
behind an expert's last request costs a sum over the runs before it, everything else
one look-up.
"""

import dataclasses
import itertools
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, MutableSequence
from typing import Any, ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.schedule.policy import Job


@dataclasses.dataclass(slots=True, eq=False)
class ExpertJob(Job):
    """One expert's part of a request.

    Attributes:
      expert: that judges.
      follow: expert that judges next; whoever ran this part says so before its step
        ends. None: the request is done.
      added_s: seconds by which it made its lane's queue longer, as predicted; load_s:
        of that, a load.
      run: of the queue that it waits in; None: it does not wait.
    """

    GIVEN: ClassVar[tuple[str, ...]] = (*Job.GIVEN, "expert")
    PROGRESS: ClassVar[tuple[str, ...]] = ("follow",)

    expert: int = 0
    follow: int | None = dataclasses.field(default=None, init=False)
    added_s: float = dataclasses.field(default=0.0, init=False)
    load_s: float = dataclasses.field(default=0.0, init=False)
    run: "JobGroup | None" = dataclasses.field(default=None, init=False, repr=False)


class JobGroup:
    """Neighbours in a queue that need the same expert; never empty.

    Attributes:
      expert: that they need; jobs: in their order.
      since_s: when the first of them came, who may have left.
    """

    __slots__ = ("expert", "jobs", "number", "since_s")

    def __init__(self, expert: int, number: int, since_s: float):
        self.expert, self.number, self.since_s = expert, number, since_s
        self.jobs: deque[ExpertJob] = deque()


class RunQueue(MutableSequence):
    """The queue of one lane.

    Args:
      waiting_E, coming_E: counts of a pool (`offload.evict_pool.State`) that are kept:
        of requests that wait here, and that may come from what waits here.
      follow: preliminary expert -> subsequent one.

    Attributes:
      runs: of each expert the run to which it was added last, while that is there and
        not begun.
      added_s, load_s: sums of `ExpertJob.added_s` and `load_s` over the queue.
    """

    def __init__(
        self,
        waiting_E: np.ndarray,
        coming_E: np.ndarray,
        follow: Mapping[int, int],
    ):
        self.runs: dict[int, JobGroup] = {}
        self.added_s = self.load_s = 0.0
        self._waiting_E, self._coming_E, self._follow = waiting_E, coming_E, follow
        self._in_order: OrderedDict[int, JobGroup] = OrderedDict()
        self._numbers = itertools.count()
        self._length = 0
        self._behind: tuple[int, int] | None = None  # expert, place; until it changes
        self._begun: JobGroup | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ExpertJob]:
        return itertools.chain.from_iterable(r.jobs for r in self._in_order.values())

    # No slices: a policy asks for one job.
    def __getitem__(self, index: int) -> ExpertJob:  # type: ignore[override]
        index += self._length if index < 0 else 0
        for job in itertools.islice(self, index, None):
            return job
        raise IndexError(f"queue of {self._length} has no place {index}")

    def __contains__(self, job: object) -> bool:
        run = getattr(job, "run", None)
        return run is not None and self._in_order.get(run.number) is run

    def index(self, job: ExpertJob, *ends: int) -> int:
        """Its place; ValueError: it is not in this queue."""
        return list(self).index(job, *ends)

    @property
    def in_order(self) -> Collection[JobGroup]:
        """The runs from the head on, in the order in which they began to wait."""
        return self._in_order.values()

    @property
    def first(self) -> JobGroup:
        """The run at the head; StopIteration: the queue is empty."""
        return next(iter(self._in_order.values()))

    @property
    def begun(self) -> JobGroup | None:
        """The run that was begun, until its last job has left."""
        return self._begun if self._begun and self._begun.jobs else None

    def begin(self, run: JobGroup) -> None:
        """Closes a run: whoever comes later for its expert starts another one."""
        self._begun, self._behind = run, None
        if self.runs.get(run.expert) is run:
            del self.runs[run.expert]

    def behind(self, expert: int) -> int:
        """The place behind the last waiting request of an expert, else the end; also
        the end if that one's run is begun."""
        last = self.runs.get(expert)
        if last is None:
            return self._length
        if self._behind is None or self._behind[0] != expert:
            place = 0
            for run in self._in_order.values():
                place += len(run.jobs)
                if run is last:
                    break
            self._behind = expert, place
        return self._behind[1]

    def insert(self, index: int, job: ExpertJob) -> None:
        """Takes a job in, at the end or behind the last one of its expert.

        Raises:
          ConfigError: another place, which would split a run.
        """
        if index == self._length:
            run = next(reversed(self._in_order.values())) if self._length else None
            if run is None or run.expert != job.expert or run is self._begun:
                run = JobGroup(job.expert, next(self._numbers), job.arrival_s)
                self._in_order[run.number] = run
            self.runs[job.expert] = run
        elif index == self.behind(job.expert):  # not the end: there is such a run
            run = self.runs[job.expert]
        else:
            raise ConfigError(
                f"place {index} of a queue of {self._length} is not behind expert "
                f"{job.expert}; expected {self.behind(job.expert)} or the end"
            )
        job.run = run
        run.jobs.append(job)
        self._count(job, 1)

    def remove(self, job: ExpertJob) -> None:
        """Takes a job out; ValueError: it is not in this queue."""
        if job not in self:
            raise ValueError(f"request {job.id} does not wait here")
        run: Any = job.run  # of this queue, so there is one
        if run.jobs[0] is job:
            run.jobs.popleft()
        else:
            run.jobs.remove(job)
        if not run.jobs:
            del self._in_order[run.number]
            if self.runs.get(job.expert) is run:
                del self.runs[job.expert]
        job.run = None
        self._count(job, -1)

    def __delitem__(self, index: int) -> None:  # type: ignore[override]
        self.remove(self[index])

    def __setitem__(self, index: int, job: ExpertJob) -> None:  # type: ignore[override]
        raise ConfigError("a job is not put in the place of another; insert and remove")

    def _count(self, job: ExpertJob, by: int) -> None:
        self._length, self._behind = self._length + by, None
        self.added_s = self.added_s + by * job.added_s if self._length else 0.0
        self.load_s = self.load_s + by * job.load_s if self._length else 0.0
        self._waiting_E[job.expert] += by
        then = self._follow.get(job.expert)
        if then is not None:
            self._coming_E[then] += by
