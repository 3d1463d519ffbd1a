"""What the scheduler keeps of requests and failures."""

import dataclasses
from collections.abc import Sequence

from moe_edge.core.checks import MoeEdgeError


class NobodyLeft(MoeEdgeError):
    """All servers are lost, or all that could compute."""

    exit_code = 3


@dataclasses.dataclass(eq=False)
class ClusterRequest:
    """A request from its arrival to its last token.

    Attributes:
      id: position in the order of arrival.
      name: the user's id.
      home: the server at which it arrives.
      domain: of its text.
      arrival_s: when it is due, from the start of the run.
      prompt: token ids.
      max_new_tokens: upper bound.
      tokens, times_s: new tokens, and when the scheduler knew them (its clock).
      made_by: the server of each token.
      at: the server that runs it; arrived_s: when it came, by the scheduler's clock.
      passed_on: whether its own server was busy and another one idle when it came.
      error: in one line, if it ended by its own error.
    """

    id: int
    name: str
    home: int
    domain: str
    arrival_s: float
    prompt: Sequence[int]
    max_new_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)
    made_by: list[int] = dataclasses.field(default_factory=list)
    at: int | None = None
    arrived_s: float | None = None
    done: bool = False
    error: str | None = None
    passed_on: bool = False

    @property
    def ended(self) -> bool:
        return self.done or self.error is not None

    def fresh(self) -> "ClusterRequest":
        """The same request, not served yet: all that has a default is what became."""
        asked = [f.name for f in dataclasses.fields(self) if _is_given(f)]
        return ClusterRequest(**{name: getattr(self, name) for name in asked})


def _is_given(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


@dataclasses.dataclass
class Failure:
    """A lost server; seconds from the start of the run.

    Attributes:
      kind: dead (its connection closed) or hung (no heartbeats, or a call overdue).
      detected_s: when the scheduler took it off the list.
      resumed_s: when the first new token of a request that it had was known; if it
        had none, of a step that began after that.
      struck_s: when a drill struck it.
      returned_s: when it was taken in again, with no blocks.
    """

    server: int
    kind: str
    detected_s: float
    resumed_s: float | None = None
    struck_s: float | None = None
    returned_s: float | None = None
