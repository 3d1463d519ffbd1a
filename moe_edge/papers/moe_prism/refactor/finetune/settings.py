"""How a refactored model's router is fine-tuned; checked before JAX is loaded."""

import dataclasses

import numpy as np

from moe_edge.core.checks import (
    CapacityError,
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.model.config import ModelConfig
from moe_edge.model.sub_experts import at_k

K_ORDERS = ("rising", "drawn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Settings of a run; with model and text they determine its result.

    Attributes:
      tokens: trained on, rounded up to whole steps.
      batch_tokens: of one gradient program: bounds memory.
      accumulate: batches whose gradients make one optimiser step.
      learning_rate: the paper's is 1e-5, for models of billions of parameters.
      k_start, k_end: (sub-)experts a token; None: a quarter of the model's own K, and
        its own K (the paper's 8 and 32 of OLMoE), or one less with a calibrated gate,
        which has nothing to choose there.
      k_stages: how many K are trained, evenly from `k_start` to `k_end`; at most as
        many as there are steps, and a single one is `k_end`.
      k_order: rising (the paper's) or drawn: every K once, in random order, again and
        again.
      teacher_kl: weight of KL to the model as it was, at its own K, beside the text's
        cross-entropy (ours); 0: the paper's loss.
      window: tokens of a sequence.
      decay: share of the steps at the end over which the learning rate falls to 0.
      held_out_rows: windows on which the loss is reported.
    """

    tokens: int = 2_000_000
    batch_tokens: int = 4096
    accumulate: int = 4
    learning_rate: float = 1e-5
    k_start: int | None = None
    k_end: int | None = None
    k_stages: int = 7
    k_order: str = "rising"
    teacher_kl: float = 0.0
    window: int = 512
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    decay: float = 0.0
    held_out_rows: int = 32
    seed: int = 0

    def __post_init__(self):
        for name in (
            *("tokens", "batch_tokens", "accumulate", "k_stages", "window"),
            "held_out_rows",
        ):
            check_count(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)
        check_positive("clip_norm", self.clip_norm)
        check_known("k_order", self.k_order, K_ORDERS)
        check_from_zero("teacher_kl", self.teacher_kl)
        if not 0 <= self.decay <= 1 or self.weight_decay < 0:
            raise ConfigError(
                f"decay must lie in 0..1 and weight_decay not be negative, got "
                f"{self.decay} and {self.weight_decay}"
            )
        if self.batch_tokens % self.window:
            raise ConfigError(
                f"batch_tokens {self.batch_tokens} must be a multiple of the window of "
                f"{self.window} tokens"
            )

    @property
    def rows(self) -> int:
        """Windows of a batch."""
        return self.batch_tokens // self.window

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimiser step."""
        return self.batch_tokens * self.accumulate

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.step_tokens)

    def rate(self, step: int) -> np.float32:
        """Learning rate of a step."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return np.float32(self.learning_rate * min(1.0, left))

    def stages(self, config: ModelConfig) -> list[int]:
        """The K that are trained, ascending.

        Raises:
          ConfigError: a K that the model does not have, or an end below the start.
        """
        top_k = config.moe.top_k
        start = max(1, top_k // 4) if self.k_start is None else self.k_start
        end = top_k - (config.moe.gate == "calibrated")
        end = end if self.k_end is None else self.k_end
        for k in (start, end):
            at_k(config, k)
        if start > end:
            raise ConfigError(f"k_start {start} exceeds k_end {end}; K grows")
        count = min(self.k_stages, self.steps)  # a stage without a step is not trained
        spread = np.linspace(start, end, count) if count > 1 else [end]
        return sorted({round(float(k)) for k in spread})

    def check(self, config: ModelConfig) -> None:
        """Refuses what a model cannot be trained with.

        Raises:
          ConfigError: see `stages`; CapacityError: a window beyond the context.
        """
        self.stages(config)
        if config.layer_scale:
            raise ConfigError(
                f"fine-tuning of {config.model_type}: no gradient passes the factor "
                "behind its layers; refactor with --gate lg"
            )
        if self.window > config.max_positions:
            raise CapacityError(
                f"window of {self.window} tokens exceeds the model's context of "
                f"{config.max_positions}"
            )

    def k_of(self, step: int, stages: list[int]) -> int:
        """K of a step: as many steps for each stage, in order or drawn."""
        if self.k_order == "drawn":
            number, place = divmod(step, len(stages))
            rng = np.random.default_rng([self.seed, number, 19])
            return stages[int(rng.permutation(len(stages))[place])]
        return stages[step * len(stages) // self.steps]
