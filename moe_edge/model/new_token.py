"""A token that a row gets: how likely it was, and what may come next."""

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np


class Score(NamedTuple):
    """How likely a token was, in the model's distribution before any rule."""

    logprob: float  # natural
    top: tuple[tuple[int, float], ...]  # (token, logprob), likeliest first, as asked


class NewToken(NamedTuple):
    """A token that a row has got."""

    id: Hashable
    token: int
    score: Score | None = None  # if asked for
    is_forced: bool = False  # one of `SlotRow.forced`


class Guide(Protocol):
    """What a row may say next: a grammar's matcher, of this row alone."""

    def fill(self, bits_W: np.ndarray) -> None:
        """Writes bits of the tokens that may come next into uint32 `[V / 32]`.

        Token i is bit i % 32 of word i // 32.
        """

    def accept(self, token: int) -> None:
        """The row has drawn this token."""
