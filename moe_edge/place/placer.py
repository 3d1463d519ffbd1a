"""What every placer gets and gives: the problem, checked once, and the interface."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.objective import check_frequency
from moe_edge.place.packing import pack, served_load
from moe_edge.place.plan import Placement, check_slots


@dataclasses.dataclass(frozen=True)
class Problem:
    """A placement to be found.

    Attributes:
      frequency_NLE: float64 [N, L, E], how often server N calls a block.
      slots: of every server int64 [G], blocks that fit on each GPU.
      cost_model: seconds on this cluster; None where nobody knows.
      current: where blocks are now, if anywhere.
      seed: orders what is random.
    """

    frequency_NLE: np.ndarray
    slots: tuple[np.ndarray, ...]
    cost_model: CostModel | None = None
    current: Placement | None = None
    seed: int = 0

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


class Placer:
    """Base of placers: frozen dataclasses whose fields are options.

    A subclass sets `name` and `SOURCE` and implements `choose` (what each server
    holds) or `assign` (which GPU holds it).
    """

    name: ClassVar[str]
    SOURCE: ClassVar[str]

    def place(
        self,
        frequency_NLE: np.ndarray,
        slots: Sequence[np.ndarray],
        cost_model: CostModel | None = None,
        current: Placement | None = None,
        seed: int = 0,
    ) -> Placement:
        """A placement that covers every block within the memory of every GPU.

        Args:
          frequency_NLE: [N, L, E], how often server N calls block E of layer L.
          slots: of every server, blocks that fit on each of its GPUs.
          cost_model: seconds on this cluster, for placers that look at time.
          current: where blocks are now.
          seed: orders what is random.
        Raises:
          ConfigError: statistics, slots or a current placement that make no sense.
          CapacityError: memory for less than one copy of the model.
        """
        frequency_NLE = check_frequency(frequency_NLE)
        N, L, E = frequency_NLE.shape
        slots = check_slots(slots, N, L * E)
        if current is not None and current.gpu_NLE.shape != frequency_NLE.shape:
            raise ConfigError(
                f"current placement has shape {current.gpu_NLE.shape}, statistics "
                f"have {frequency_NLE.shape}"
            )
        placement = self.assign(
            Problem(frequency_NLE, slots, cost_model, current, seed)
        )
        placement.check(slots)
        return placement

    def assign(self, problem: Problem) -> Placement:
        """The choice of `choose`, packed on the GPUs of each server."""
        on_NLE = self.choose(problem)
        load_NLE = served_load(problem.frequency_NLE, on_NLE)
        return Placement(pack(on_NLE, problem.slots, load_NLE, problem.speeds))

    def choose(self, problem: Problem) -> np.ndarray:
        """bool [N, L, E]: what each server holds."""
        raise NotImplementedError
