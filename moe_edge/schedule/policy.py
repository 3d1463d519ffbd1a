"""What decides the order of requests: jobs, lanes and the interface of the policies.

A policy sees ids, bytes, seconds and K, no tokens and no text. So token serving, a
collaboration of experts and the simulators run the same policies behind the same loop.
"""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import PlugIn, Registry, is_object
from moe_edge.core.plug_in_options import needed, options_of

COMING, WAITING, RUNNING = "coming", "waiting", "running"
OUTCOMES = ("finished", "cancelled", "refused", "failed", "expired")


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """A request as policies see it; whoever runs it adds what else it needs.

    Attributes:
      id: unique among the requests of a loop that have not ended.
      home: number of the lane where it came in.
      arrival_s: when.
      floor: fewest experts a token that it may run with; None where K is no matter.
      deadline_s: when its answer is worth nothing any more; None: never.
      kv_bytes: that its cache will have at most; reserved when it is admitted.
      k: experts a token that it runs with now; None where K is no matter.
      lane: number of the lane that it was assigned to.
      state: new, coming, waiting, running, or how it ended: one of OUTCOMES.
    """

    GIVEN: ClassVar[tuple[str, ...]] = (
        *("id", "home", "arrival_s", "floor", "deadline_s", "kv_bytes"),
    )
    PROGRESS: ClassVar[tuple[str, ...]] = ()  # what its steps change and policies read

    id: int
    home: int = 0
    arrival_s: float = 0.0
    floor: int | None = None
    deadline_s: float | None = None
    kv_bytes: int = 0
    k: int | None = dataclasses.field(default=None, init=False)
    lane: int = dataclasses.field(default=0, init=False)
    state: str = dataclasses.field(default="new", init=False)


class Lane:
    """A queue with its executor.

    Attributes:
      number: of the lane.
      waiting: jobs that are not admitted yet, in the order of the queue; a deque, or
        what the policy's `queue` made.
      running: admitted jobs that are not finished, in the order of admission.
      coming: jobs that were assigned to this lane and are on their way to it.
      stepping: whether a step of the running jobs has begun and not ended.
      again_s: when the policy wants to be asked again; None: at the next event.
      budget_bytes: that the caches of its running jobs may have together.
    """

    __slots__ = (
        *("again_s", "budget_bytes", "coming", "number", "running", "stepping"),
        *("waiting", "_together"),
    )

    def __init__(
        self,
        number: int,
        budget_bytes: float = math.inf,
        together: Callable[[Iterable[int]], int] = sum,
        waiting: MutableSequence[Job] | None = None,
    ):
        self.number = number
        # Jobs of whatever class its loop runs: their policies know which.
        self.waiting: Any = deque() if waiting is None else waiting
        self.running: list[Any] = []
        self.coming = 0
        self.stepping = False
        self.again_s: float | None = None
        self.budget_bytes, self._together = budget_bytes, together

    @property
    def idle(self) -> bool:
        """Nothing to do, and nothing on its way here."""
        return not (self.running or self.waiting or self.coming)

    def kv_bytes(self, more: Sequence[Job] = ()) -> int:
        """Of the caches of the running jobs, and of more if these were admitted."""
        return self._together([job.kv_bytes for job in (*self.running, *more)])

    def fits(self, more: Sequence[Job] = ()) -> bool:
        """Whether that is within the budget."""
        return self.budget_bytes == math.inf or self.kv_bytes(more) <= self.budget_bytes

    def first(self, most: int) -> list[Any]:
        """The first waiting jobs, up to the first one for which there is no room."""
        chosen = list(itertools.islice(self.waiting, max(most, 0)))
        while chosen and not self.fits(chosen):
            chosen.pop()
        return chosen


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


NOTHING = Decision()


class Scheduler(PlugIn):
    """Decides which request runs next. Pure, host only, without a clock of its own.

    The request loop (`loop.RequestLoop`) of the server, the load generator, the
    simulators and a collaboration of experts calls

        queue    once for each lane
        assign   when a request comes
        place    when it is at its lane
        pick     before every step of a lane, and at the `again_s` that it named
        done     when a request has finished

    with the time in seconds since any fixed moment. It holds a policy to the rules, and
    refuses by name what breaks one: each request ends once; no cache beyond the budget;
    no K below a floor; no more than `max_batch` running. Fields called max_batch,
    max_wait_s, own_k and costs (of steps: `hardware.step_costs.StepCosts`) get the
    server's value, unless they are given in `policy_options`. A server of tokens has
    one lane, whose jobs are `request.Request`, and refuses a scheduler whose
    `max_batch` exceeds its own; servers in processes of their own (`serve --servers`)
    know names alone. moe-edge cluster schedules by itself.

    Attributes:
      max_batch: jobs that a lane runs at a time; 0 of a policy that names no such
        number, which no server takes.

    >>> from moe_edge.schedule.policy import Decision
    >>> class OneByOne(me.Scheduler):
    ...     '''Requests in order of arrival, one at a time.'''
    ...     max_batch = 1
    ...     def pick(self, lane, now_s):
    ...         jobs = lane.first(1 - len(lane.running))
    ...         return Decision([(job.id, job.floor) for job in jobs])
    >>> from moe_edge.serve.options import ServingOptions
    >>> ServingOptions(policy=OneByOne, max_batch=1).policy.name
    'OneByOne'
    """

    required: ClassVar[tuple[str, ...]] = ("pick",)
    max_batch: int = 0

    def queue(self, number: int) -> MutableSequence[Job]:
        """The empty queue of a lane; one with an index saves a policy its scans."""
        return deque()

    def assign(self, job: Any, lanes: Sequence[Lane], now_s: float) -> int:
        """The lane that a new job goes to: where it came in, 0 unless it says."""
        return job.home

    def place(self, job: Any, lane: Lane, now_s: float) -> int:
        """Where in the queue of its lane a job goes: an index into `lane.waiting`."""
        return len(lane.waiting)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        """What the lane does in the step that begins now."""
        raise NotImplementedError

    def done(self, job: Any, now_s: float) -> Sequence[Job]:
        """Follow-up jobs of a finished one; they arrive now."""
        return ()


class InOrderOfArrival(Scheduler):
    """Base of policies whose queue stands in order of arrival."""

    def place(self, job: Job, lane: Lane, now_s: float) -> int:
        """Before those that came after it: as a rule the end. A server reads long
        prompts for a while before it admits them."""
        place = len(lane.waiting)
        while place and lane.waiting[place - 1].arrival_s > job.arrival_s:
            place -= 1
        return place


SCHEDULERS = Registry(
    "scheduling policy", Scheduler, "policy_options", "moe_edge.schedule"
)


def get_scheduler(
    policy: str | type | Scheduler,
    options: Mapping[str, Any] = MappingProxyType({}),
    **has: Any,
) -> Scheduler:
    """The policy of a name, a class, or an object.

    Args:
      options: of a name or class.
      **has: what a server gives to fields of these names: max_batch, max_wait_s, own_k
        (experts a token of the model itself), costs (of its steps, or None).
    Raises:
      ConfigError: an unknown name (the known ones are listed), an option that it needs
        and did not get, or a bad value.
    """
    kind = SCHEDULERS.class_of(policy)
    if not is_object(policy):
        fields = {field.name for field in options_of(kind)}
        filled = {n: v for n, v in has.items() if n in fields and v is not None}
        if missing := [n for n in needed(kind) if n not in {*filled, *options}]:
            raise ConfigError(
                f"scheduling policy {kind.name} got no {', '.join(missing)}; costs are "
                "measured by moe-edge profile_machine --checkpoint, other options are "
                "given in policy_options"
            )
        options = {**filled, **options}
    return SCHEDULERS.make(policy, options)
