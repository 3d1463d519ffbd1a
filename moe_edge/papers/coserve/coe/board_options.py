"""What a board is to have, and how its experts are trained; loads no JAX."""

import dataclasses
import math

from moe_edge.core.checks import ConfigError, check_count, check_positive
from moe_edge.papers.coserve.workload.coe_tasks import DECAY, FOLLOWED_SHARE

WIDER = {"single": 1, "single_wide": 4}  # networks for all types, beside an expert
MOST_TYPES = 100_000
TYPES_A_DETECTOR, MOST_DETECTORS = 6, 30


@dataclasses.dataclass(frozen=True)
class BoardOptions:
    """What a board has.

    Attributes:
      types: of components.
      trained_types: the first ones, whose classifiers are trained; those of others
        are perturbed copies. None: all.
      detectors: that types share; None: one for six types, at most 30.
      width: channels of the first stage of every network.
      decay: of the frequencies, in types: p_i ~ exp(-i / decay) in a random order.
    """

    types: int = 24
    trained_types: int | None = None
    detectors: int | None = None
    width: int = 16
    decay: float = DECAY

    def __post_init__(self):
        check_count("types", self.types)
        if self.types > MOST_TYPES:
            raise ConfigError(
                f"types is {self.types}, expected at most {MOST_TYPES}: each has a "
                "network of its own"
            )
        check_count("width", self.width)
        check_positive("decay", self.decay)
        for name in ("trained_types", "detectors"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if (self.trained_types or 0) > self.types:
            raise ConfigError(
                f"trained_types is {self.trained_types} of {self.types} types; lower it"
            )
        followed = sum(map(is_followed, range(self.types)))
        if followed < (self.detectors or 0):
            raise ConfigError(
                f"detectors is {self.detectors}, but only {followed} of {self.types} "
                "types go on to one; lower it"
            )

    @property
    def num_trained(self) -> int:
        """Types whose classifier is trained."""
        return self.types if self.trained_types is None else self.trained_types

    @property
    def num_detectors(self) -> int:
        followed = sum(map(is_followed, range(self.types)))
        usual = min(math.ceil(self.types / TYPES_A_DETECTOR), MOST_DETECTORS)
        return min(usual, followed) if self.detectors is None else self.detectors


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one network is trained.

    Attributes:
      steps: of `batch` images each.
      learning_rate: highest of AdamW.
    """

    steps: int = 600
    batch: int = 32
    learning_rate: float = 2e-3

    def __post_init__(self):
        for name in ("steps", "batch"):
            check_count(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)


def is_followed(number: int) -> bool:
    """Whether the type of that number goes on to a detector: 35 % of the first ones."""
    shares = (math.floor(FOLLOWED_SHARE * n + 1e-9) for n in (number, number + 1))
    return next(shares) < next(shares)
