"""What a predictor that is an engine itself is to the engine that it predicts.

A predictor that needs a shadow makes one (`Predictor.companion`); an engine of mode
layered runs it a token ahead and hands its choices to the predictor's `store`.
"""

from collections.abc import Sequence
from typing import Protocol

import jax

from moe_edge.engine.session import Session

Choices = list[jax.Array | None]  # of every layer int32 [B, K]; None in dense layers


class Companion(Protocol):
    """Runs beside an engine that holds the model, in its process.

    Attributes:
      num_bytes: of its weights.
    """

    @property
    def num_bytes(self) -> int: ...

    def num_compiled(self) -> int:
        """Programs compiled so far."""

    def at_k(self, k: int) -> "Companion":
        """The same sessions at another operating point."""

    def note_prompts(self, session: Session, prompts: Sequence[Sequence[int]]) -> None:
        """A session begins."""

    def step(self, session: Session, tokens_B, active_B) -> Choices:
        """Choices for the tokens that are about to be decoded in a session."""
