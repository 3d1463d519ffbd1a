"""A placement to be found: all that placers may look at, checked once."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_positive, check_shape
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.plan import Placement, check_slots


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What requests are like, for placers that predict seconds.

    Attributes:
      top_k: blocks that a token calls.
      prompt_tokens: of a request, one number or one a server.
      output_tokens: likewise; each is a decode step.
      requests_per_s: that arrive at a server; None leaves queues out.
    """

    top_k: int = 8
    prompt_tokens: float | Sequence[float] = 256.0
    output_tokens: float | Sequence[float] = 32.0
    requests_per_s: float | Sequence[float] | None = None

    def __post_init__(self):
        check_count("top_k", self.top_k)
        for name in ("prompt_tokens", "output_tokens", "requests_per_s"):
            given = getattr(self, name)
            for value in () if given is None else np.atleast_1d(given):
                check_positive(name, value)


def check_frequency(frequency_NLE: np.ndarray) -> np.ndarray:
    """float64 [N, L, E] of finite frequencies with calls in every layer.

    Raises:
      ConfigError: another rank or other values, a layer that a server never calls.
    """
    frequency_NLE = np.asarray(frequency_NLE, np.float64)
    check_shape("frequency_NLE", frequency_NLE, (None, None, None))
    bad = ~(np.isfinite(frequency_NLE) & (frequency_NLE >= 0))
    if bad.any():
        place = np.argwhere(bad)[0].tolist()
        value = frequency_NLE[tuple(place)]
        raise ConfigError(
            f"frequency of (server, layer, block) {place} is {value}, expected a "
            "finite number from 0"
        )
    silent = np.argwhere(frequency_NLE.sum(axis=-1) <= 0)
    if len(silent) or not frequency_NLE.size:
        place = silent[0].tolist() if len(silent) else list(frequency_NLE.shape)
        raise ConfigError(
            f"frequencies of (server, layer) {place} sum to 0, expected calls of every "
            "layer; count more tokens"
        )
    return frequency_NLE


@dataclasses.dataclass(frozen=True)
class Problem:
    """A placement to be found: all that placers may look at, checked once.

    Attributes:
      frequency_NLE: float64 [N, L, E], how often server N calls a block.
      slots: of every server int64 [G], blocks that fit on each GPU.
      cost_model: the machines and what calls cost on them; None: unknown.
      current: where blocks are now, if anywhere.
      seed: orders what is random.
      traffic: what requests are like.
    Raises:
      ConfigError: statistics, slots or a current placement that make no sense.
      CapacityError: memory for less than one copy of the model.
    """

    frequency_NLE: np.ndarray
    slots: Sequence[np.ndarray]
    cost_model: CostModel | None = None
    current: Placement | None = None
    seed: int = 0
    traffic: Traffic = Traffic()

    def __post_init__(self):
        frequency_NLE = check_frequency(self.frequency_NLE)
        block_bytes = self.cost_model.block.num_bytes if self.cost_model else None
        sizes = len(frequency_NLE), frequency_NLE[0].size, block_bytes
        slots = check_slots(self.slots, *sizes)
        object.__setattr__(self, "frequency_NLE", frequency_NLE)
        object.__setattr__(self, "slots", slots)
        if self.current is not None and (
            self.current.gpu_NLE.shape != frequency_NLE.shape
        ):
            raise ConfigError(
                f"current placement has shape {self.current.gpu_NLE.shape}, statistics "
                f"have {frequency_NLE.shape}"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of one copy of the model."""
        return self.frequency_NLE[0].size

    @property
    def capacity_N(self) -> np.ndarray:
        """int64 [N]: different blocks that a server can hold."""
        total_N = np.array([slots_G.sum() for slots_G in self.slots])
        return np.minimum(total_N, self.num_blocks)

    @property
    def speeds(self) -> list[np.ndarray]:
        """Of every server, relative speed of its GPUs at one block and one token."""
        if self.cost_model is None:
            return [np.ones(len(slots_G)) for slots_G in self.slots]
        return [
            1 / np.array([self.cost_model.compute_s(n, g, 1) for g in range(len(s))])
            for n, s in enumerate(self.slots)
        ]
