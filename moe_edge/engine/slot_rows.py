"""A row of a running batch: what was asked for, and how far it has come."""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from moe_edge.core.checks import CapacityError, RequestError, check_count
from moe_edge.model.new_token import Guide, Score
from moe_edge.model.sampling import Sampling

MOST_LOGPROBS = 20  # likeliest tokens that a step reports, if any row asks


@dataclasses.dataclass(eq=False, kw_only=True)
class SlotRow:
    """A prompt to continue, with the rule of its own.

    Who asks gives the first group; the slots write the second, in a copy of theirs.
    """

    id: Hashable  # names the row in every call; of no other row that is not released
    prompt: tuple[int, ...]
    max_new_tokens: int  # forced ones not among them; 0 only with such
    k: int | None = None  # experts (or sub-experts) a token; None: the model's own
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    # Likeliest tokens to report with each token's own log probability; None: neither.
    top_logprobs: int | None = None
    # The same of the prompt's own tokens (`prompt_scores`), as its chunks run: it needs
    # `top_logprobs`, and nothing is taken from the prompt cache.
    score_prompt: bool = False
    # Tokens that follow the prompt, fed one by one where drawn ones would be, each
    # reported and scored as those are. A prompt's chunks are computed losslessly also
    # where decoding is not: this is how such an engine scores a text.
    forced: tuple[int, ...] = ()
    guide: Guide | None = None  # of the tokens that are drawn; None: any

    tokens: list[int] = dataclasses.field(init=False)  # the prompt and what followed
    sequence: int = dataclasses.field(default=-1, init=False)  # `Session.sequences`
    # In the running session; None before.
    place: int | None = dataclasses.field(default=None, init=False)
    length: int = dataclasses.field(default=0, init=False)  # tokens in the cache
    # Of those, how many came from the prompt cache.
    cached: int = dataclasses.field(default=0, init=False)
    # At which K its first tokens are computed, once begun; how many are (None: all).
    prompt_k: int | None = dataclasses.field(default=None, init=False)
    same_k: int | None = dataclasses.field(default=None, init=False)
    released: bool = dataclasses.field(default=False, init=False)
    # Behind how many of its prompt's tokens states are kept (`PromptCache.ends`).
    kept_ends: set[int] = dataclasses.field(default_factory=set, init=False)
    # Of `guide`; None: not asked yet.
    allowed_W: np.ndarray | None = dataclasses.field(default=None, init=False)
    # Of the prompt's tokens from the second on, each after those before it.
    prompt_scores: list[Score] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def need(self) -> int:
        """Positions of the cache that it takes.

        The last token is never written, but a row with all its tokens rests at that
        position until it is released, and every step writes where rows are.
        """
        return len(self.prompt) + len(self.forced) + self.max_new_tokens

    @property
    def emitted(self) -> int:
        """Tokens that it has drawn; below 0 while forced ones are to come."""
        return len(self.tokens) - len(self.prompt) - len(self.forced)

    @property
    def next_forced(self) -> int | None:
        """The token that it gets next, if that is a forced one."""
        return self.forced[self.emitted] if self.emitted < 0 else None

    @property
    def is_active(self) -> bool:
        """Whether it takes part in the next step."""
        return self.place is not None and self.emitted < self.max_new_tokens

    def allowed(self, words: int) -> np.ndarray:
        """Bits of tokens that its guide lets come next, uint32 `[words]`."""
        if self.allowed_W is None:  # once a token
            self.allowed_W = np.empty(words, np.uint32)
            self.guide.fill(self.allowed_W)
        return self.allowed_W

    def scores(self, found: Sequence[np.ndarray]) -> list[Score]:
        """From arrays of `row_sampling.log_probs`, as many likely tokens as it asks."""
        each = zip(*(array.tolist() for array in found), strict=True)
        return [
            Score(own, tuple(zip(ids_N, values_N, strict=True))[: self.top_logprobs])
            for own, values_N, ids_N in each
        ]

    def checked(self, vocab_size: int, own_k: int, max_context: int) -> "SlotRow":
        """A fresh row for slots of a model, of a known K.

        Raises:
          RequestError, CapacityError: see `RowSlots.admit`.
        """
        from moe_edge.engine.session import check_prompts  # it loads JAX

        given = self.prompt + self.forced
        check_prompts([self.prompt and given], vocab_size)
        if self.max_new_tokens or not self.forced:
            check_count("max_new_tokens", self.max_new_tokens)
        if self.need > max_context:
            raise CapacityError(
                f"row {self.id!r}: {len(given)} tokens and {self.max_new_tokens} "
                f"new ones exceed max_context {max_context}"
            )
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MOST_LOGPROBS:
            raise RequestError(
                f"row {self.id!r}: top_logprobs must be 0..{MOST_LOGPROBS}, got {top}"
            )
        if self.score_prompt and top is None:
            raise RequestError(
                f"row {self.id!r}: score_prompt without top_logprobs; give 0 or more"
            )
        k = own_k if self.k is None else self.k
        return dataclasses.replace(self, k=check_k(self.id, k, own_k))


def check_k(id: Hashable, k: int, own_k: int) -> int:
    """The K of a row, which is at most the model's; RequestError for another."""
    if not 1 <= k <= own_k:
        raise RequestError(f"row {id!r}: K must be 1..{own_k} (the model's), got {k}")
    return k
