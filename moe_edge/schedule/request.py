"""A request for tokens: one row, as it was asked for and as far as it has come."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

from moe_edge.model.new_token import Guide, NewToken, Score
from moe_edge.model.sampling import Sampling
from moe_edge.schedule.policy import Job


def _never(new: NewToken) -> None:
    """A row that runs as long as it may."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request(Job):
    """A job with what was asked, and what became of it.

    Server, load generator, cluster and simulator serve this object; a policy reads what
    a `Job` has, and what `GIVEN` and `PROGRESS` name. Who asks writes the first group
    of attributes, before the request is submitted; all else is written by the one
    thread that runs it. A request is submitted once: `dataclasses.replace` makes a
    fresh one of it.

    Attributes:
      id: of a loop; -1 until the driver has given one.
      prompt: token ids; () in computed time. prompt_tokens: how many there are.
      new_tokens: most that it may get, at least 1.
      only_scored: it gets none: the last token of its prompt, of two or more, is taken
        for its one new token, so that a prompt may fill the context.
      top_logprobs, score_prompt: as of `slot_rows.SlotRow`.
      guide: of the tokens that are drawn, of this row alone.
      ends: is told each new token; the reason if the row ends with it (`eos`, `stop`).
        What it raises fails this row alone.

      made: new tokens so far; whoever runs it counts before a step ends.
      admitted_s: when its first step began; first_s, last_s: when its first and last
        token were there; None: never.
      k_sum: of the K of each new token; k_least, k_most: the smallest, the largest.
      ended_by: `eos`, `stop`, `length` or `deadline`, of one that finished.
      cached_tokens: of its prompt, that the prompt cache spared.
      prompt_scores: of the prompt's tokens from the second on, if asked for.
      moved_bytes: its share of what steps moved to the device.
      routed, substituted: its share of the experts that steps chose under a lossy
        route, and of those that were others than the router's.
    """

    GIVEN: ClassVar[tuple[str, ...]] = (*Job.GIVEN, "prompt_tokens", "new_tokens")
    PROGRESS: ClassVar[tuple[str, ...]] = ("made",)

    id: int = dataclasses.field(default=-1, kw_only=False)
    prompt_tokens: int = 1
    new_tokens: int = 1
    prompt: tuple[int, ...] = ()
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    only_scored: bool = False
    top_logprobs: int | None = None
    score_prompt: bool = False
    guide: Guide | None = None
    ends: Callable[[NewToken], str | None] = _never

    made: int = dataclasses.field(default=0, init=False)
    admitted_s: float | None = dataclasses.field(default=None, init=False)
    first_s: float | None = dataclasses.field(default=None, init=False)
    last_s: float | None = dataclasses.field(default=None, init=False)
    k_sum: int = dataclasses.field(default=0, init=False)
    k_least: int | None = dataclasses.field(default=None, init=False)
    k_most: int | None = dataclasses.field(default=None, init=False)
    ended_by: str | None = dataclasses.field(default=None, init=False)
    cached_tokens: int = dataclasses.field(default=0, init=False)
    prompt_scores: list[Score] = dataclasses.field(default_factory=list, init=False)
    moved_bytes: float = dataclasses.field(default=0.0, init=False)
    routed: float = dataclasses.field(default=0.0, init=False)
    substituted: float = dataclasses.field(default=0.0, init=False)

    def __post_init__(self):
        if self.prompt:
            self.prompt_tokens = len(self.prompt)

    @property
    def left(self) -> int:
        """New tokens that it may still get."""
        return self.new_tokens - self.made

    def add(self, time_s: float) -> None:
        """A token is there, at the K of now."""
        self.made += 1
        self.note(time_s)

    def note(self, time_s: float) -> None:
        """When a token that was counted was there, and its K."""
        self.first_s = time_s if self.first_s is None else self.first_s
        self.last_s, k = time_s, self.k or 0
        self.k_sum += k
        self.k_least = k if self.k_least is None else min(k, self.k_least)
        self.k_most = k if self.k_most is None else max(k, self.k_most)

    # Seconds; NaN of what never was.

    @property
    def queue_s(self) -> float:
        """From arrival to the first step."""
        return _between(self.arrival_s, self.admitted_s)

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return _between(self.arrival_s, self.first_s)

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return _between(self.arrival_s, self.last_s)

    @property
    def tpot_s(self) -> float | None:
        """Of each token after the first; None if there is none."""
        if self.made < 2:
            return None
        return _between(self.first_s, self.last_s) / (self.made - 1)


def _between(start_s: float | None, end_s: float | None) -> float:
    return math.nan if start_s is None or end_s is None else end_s - start_s
