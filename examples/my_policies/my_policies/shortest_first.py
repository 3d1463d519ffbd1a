"""A scheduler: the request with the fewest tokens is next, for a while."""

import dataclasses

import moe_edge as me
from moe_edge.schedule.policy import Decision


@dataclasses.dataclass(frozen=True)
class ShortestFirst(me.Scheduler):
    """Requests join between two steps, the shortest first, each at its own floor of K.

    Attributes:
      max_batch: rows that run at a time; the server's, unless it is given.
      patience_s: seconds after which a request that waits is passed by no other.
    """

    max_batch: int = 8
    patience_s: float = 5.0

    name = "my_shortest_first"
    SOURCE = "an example"

    def __post_init__(self):
        if self.max_batch < 1 or not self.patience_s >= 0:
            raise me.ConfigError(
                f"max_batch is {self.max_batch} and patience_s {self.patience_s}, "
                "expected 1 or more and 0 or more"
            )

    def place(self, job, lane, now_s: float) -> int:
        """Before the first longer one that still has patience."""
        place = len(lane.waiting)
        while place:
            before = lane.waiting[place - 1]
            if now_s - before.arrival_s >= self.patience_s:
                break
            if tokens(before) <= tokens(job):
                break
            place -= 1
        return place

    def pick(self, lane, now_s: float) -> Decision:
        first = lane.first(self.max_batch - len(lane.running))
        return Decision([(job.id, job.floor) for job in first])


def tokens(job) -> int:
    """All that a request makes the engine compute."""
    return job.prompt_tokens + job.new_tokens
