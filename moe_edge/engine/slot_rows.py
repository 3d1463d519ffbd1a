"""A row of a running batch: what was asked for, and how far it has come."""

import dataclasses
from collections.abc import Hashable

import numpy as np

from moe_edge.model.new_token import Guide, Score
from moe_edge.model.sampling import Sampling

MOST_LOGPROBS = 20  # likeliest tokens that a step reports, if any row asks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt to continue, with the rule of its own."""

    id: Hashable  # names the row in every call; of no other row that is not released
    prompt: tuple[int, ...]
    max_new_tokens: int  # forced ones not among them; 0 only with such
    k: int | None = None  # experts (or sub-experts) a token; None: the model's own
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    # Likeliest tokens to report with each token's own log probability; None: neither.
    top_logprobs: int | None = None
    # The same of the prompt's own tokens (`LiveRow.prompt_scores`), as its chunks run:
    # it needs `top_logprobs`, and nothing is taken from the prompt cache.
    score_prompt: bool = False
    # Tokens that follow the prompt, fed one by one where drawn ones would be, each
    # reported and scored as those are. A prompt's chunks are computed losslessly also
    # where decoding is not: this is how such an engine scores a text.
    forced: tuple[int, ...] = ()
    guide: Guide | None = None  # of the tokens that are drawn; None: any

    @property
    def need(self) -> int:
        """Positions of the cache that it takes.

        The last token is never written, but a row with all its tokens rests at that
        position until it is released, and every step writes where rows are.
        """
        return len(self.prompt) + len(self.forced) + self.max_new_tokens


@dataclasses.dataclass(eq=False)
class LiveRow:
    """A row between `admit` and `release`."""

    row: Row
    k: int
    tokens: list[int]  # the prompt and what followed
    sequence: int = -1  # see `Session.sequences`
    place: int | None = None  # in the running session; None before
    length: int = 0  # tokens in the cache
    cached: int = 0  # of those, how many came from the prompt cache
    prompt_k: int | None = None  # at which its first tokens are computed, once begun
    same_k: int | None = None  # how many tokens are; None: all
    released: bool = False
    # Behind how many of its prompt's tokens states are kept (`PromptCache.ends`).
    kept_ends: set[int] = dataclasses.field(default_factory=set)
    allowed_W: np.ndarray | None = None  # of `row.guide`; None: not asked yet
    # Of the prompt's tokens from the second on, each after those before it.
    prompt_scores: list["Score"] = dataclasses.field(default_factory=list)

    @property
    def emitted(self) -> int:
        """Tokens that it has drawn; below 0 while forced ones are to come."""
        row = self.row
        return len(self.tokens) - len(row.prompt) - len(row.forced)

    @property
    def next_forced(self) -> int | None:
        """The token that it gets next, if that is a forced one."""
        return self.row.forced[self.emitted] if self.emitted < 0 else None

    @property
    def is_active(self) -> bool:
        """Whether it takes part in the next step."""
        return self.place is not None and self.emitted < self.row.max_new_tokens
