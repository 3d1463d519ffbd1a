"""How a run trains: fresh weights, loss and optimiser, batches; no JAX is loaded."""

import dataclasses
from pathlib import Path

from moe_edge.core.checks import ConfigError, check_from_zero, check_positive
from moe_edge.training import data


@dataclasses.dataclass(frozen=True)
class Start:
    """How large fresh weights are.

    Attributes:
      embedding_std: standard deviation of the token embeddings. They begin the
        residual stream, and at the usual 0.02 the first layers' outputs drown them.
      expert_scale: factor on the experts' usual start: eight outputs that are averaged
        add up to less than one.
    """

    embedding_std: float = 1.0
    expert_scale: float = 1.5

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            check_positive(name, value)


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of the loss and the optimiser.

    Attributes:
      balance: weight of the load-balancing loss (Switch, arXiv 2101.03961, eq. 4).
      expert_rate_factor: on the learning rate of the experts, which see few tokens
        each, through small weights. At the common rate the dense weights learn the
        text first (measured at 0.39 M tokens: docs/measurements.md).
      clip_norm: bound of the gradient's global norm.
    """

    balance: float = 0.01
    expert_rate_factor: float = 3.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0

    def __post_init__(self):
        for name in ("balance", "weight_decay"):
            check_from_zero(name, getattr(self, name))
        check_positive("expert_rate_factor", self.expert_rate_factor)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a run is cut into batches, and when it saves, evaluates and stops.

    Attributes:
      batch_tokens: tokens of a step, a multiple of `data.CHUNK`.
      length: sequence length; `long_length` once the decay has begun.
      max_minutes: stop after so many minutes of this process (None: never).
      pause_file: while it exists the loop sleeps between steps.
    """

    batch_tokens: int = 1024
    length: int = 256
    long_length: int = 512
    max_minutes: float | None = None
    checkpoint_minutes: float = 5.0
    evaluate_minutes: float = 10.0
    log_steps: int = 10
    pause_file: Path | None = None

    def __post_init__(self):
        if self.batch_tokens % data.CHUNK or self.batch_tokens <= 0:
            raise ConfigError(
                f"batch_tokens {self.batch_tokens} must be a multiple of {data.CHUNK}"
            )
        for name in ("max_minutes", "checkpoint_minutes", "evaluate_minutes"):
            if getattr(self, name) is not None:
                check_from_zero(name, getattr(self, name))
