"""Learning rate: warm up, stay, decay (WSD), so that a run may end when it must.

The rate depends on tokens and, where the run has a deadline, on the minutes left:
the decay starts at whichever comes first. A resumed run may be given another end.
"""

import dataclasses

from moe_edge.core.checks import ConfigError, check_positive


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Warm-up, plateau, linear decay to `final_ratio` of the peak.

    Attributes:
      peak: learning rate of the plateau.
      warmup_tokens: length of the linear warm-up.
      train_tokens: where the run ends.
      decay_tokens: length of the decay before that end.
      decay_minutes: length of the decay before the deadline, where there is one.
    """

    peak: float = 2e-3
    warmup_tokens: int = 300_000
    train_tokens: int = 10_000_000
    decay_tokens: int = 2_500_000
    decay_minutes: float = 25.0
    final_ratio: float = 0.05

    def __post_init__(self):
        for name in ("peak", "warmup_tokens", "train_tokens", "decay_tokens"):
            check_positive(name, getattr(self, name))
        check_positive("decay_minutes", self.decay_minutes)
        if self.decay_tokens > self.train_tokens:
            raise ConfigError(
                f"decay_tokens {self.decay_tokens} exceeds train_tokens "
                f"{self.train_tokens}; shorten the decay"
            )

    def left(self, tokens: int, minutes_left: float | None = None) -> float:
        """What is left of the decay: 1 until it starts, 0 at the end."""
        left = (self.train_tokens - tokens) / self.decay_tokens
        if minutes_left is not None:
            left = min(left, minutes_left / self.decay_minutes)
        return min(max(left, 0.0), 1.0)

    def rate(self, tokens: int, minutes_left: float | None = None) -> float:
        """Learning rate after `tokens`, with `minutes_left` until the deadline."""
        warm = min(1.0, (tokens + 1) / self.warmup_tokens)
        left = self.left(tokens, minutes_left)
        return self.peak * warm * (self.final_ratio + (1 - self.final_ratio) * left)
