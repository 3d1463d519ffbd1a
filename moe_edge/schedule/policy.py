"""What decides the order of requests: jobs, lanes and the interface of the policies.

A policy sees ids, bytes, seconds and K, no tokens and no text. So token serving, a
collaboration of experts and the simulators run the same policies behind the same loop.
"""

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """A request as policies see it; whoever runs it adds what else it needs.

    Attributes:
      id: unique among the requests of a loop.
      home: number of the lane where it came in.
      arrival_s: when.
      k: experts a token that it runs with now; None where K is no matter.
    """

    id: int
    home: int = 0
    arrival_s: float = 0.0
    k: int | None = None


class Lane:
    """A queue with its executor.

    Attributes:
      number: of the lane.
      waiting: jobs that are not admitted yet, in the order of the queue.
      running: admitted jobs that are not finished, in the order of admission.
      coming: jobs that were assigned to this lane and are on their way to it.
      stepping: whether a step of the running jobs has begun and not ended.
      again_s: when the policy wants to be asked again; None: at the next event.
    """

    __slots__ = ("again_s", "coming", "number", "running", "stepping", "waiting")

    def __init__(self, number: int):
        self.number = number
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.coming = 0
        self.stepping = False
        self.again_s: float | None = None

    @property
    def idle(self) -> bool:
        """Nothing to do, and nothing on its way here."""
        return not (self.running or self.waiting or self.coming)


class Decision(NamedTuple):
    """What a lane does in its next step.

    Attributes:
      admit: (id, K) of waiting jobs that join; K is None where there is none.
      k: id -> K of running jobs whose K changes.
      again_s: when to ask again if no event comes before; None: not at all.
    """

    admit: Sequence[tuple[int, int | None]] = ()
    k: Mapping[int, int] = {}
    again_s: float | None = None


class SchedulePolicy:
    """Base of scheduling policies: pure, host only, without a clock of their own."""

    name: ClassVar[str]
    SOURCE: ClassVar[str]

    def assign(self, job: Job, lanes: Sequence[Lane], now_s: float) -> int:
        """The lane that a new job goes to."""
        return 0

    def place(self, job: Job, lane: Lane, now_s: float) -> int:
        """Where in the queue of its lane a job goes: an index into `lane.waiting`."""
        return len(lane.waiting)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        """What the lane does in the step that begins now."""
        raise NotImplementedError

    def done(self, job: Job, now_s: float) -> Sequence[Job]:
        """Follow-up jobs of a finished one; they arrive now."""
        return ()
