"""A request for tokens, as scheduling policies see it."""

import dataclasses
from typing import ClassVar

from moe_edge.schedule.policy import Job


@dataclasses.dataclass(slots=True, eq=False)
class TokenJob(Job):
    """A job whose `floor` is known, and how many tokens it is about.

    Attributes:
      prompt_tokens: of its prompt, at least 1.
      new_tokens: most that it may get, at least 1.
      made: new tokens so far; whoever runs it counts before a step ends.
    """

    GIVEN: ClassVar[tuple[str, ...]] = (*Job.GIVEN, "prompt_tokens", "new_tokens")
    PROGRESS: ClassVar[tuple[str, ...]] = ("made",)

    prompt_tokens: int = 1
    new_tokens: int = 1
    made: int = dataclasses.field(default=0, init=False)

    @property
    def left(self) -> int:
        """New tokens that it may still get."""
        return self.new_tokens - self.made
