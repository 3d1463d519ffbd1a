"""What every placer gets and gives: the problem, checked once, and the interface."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_positive
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.objective import check_frequency
from moe_edge.place.packing import pack, served_load
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


@dataclasses.dataclass(frozen=True)
class Problem:
    """A placement to be found: all that placers may look at, checked once.

    Attributes:
      frequency_NLE: float64 [N, L, E], how often server N calls a block.
      slots: of every server int64 [G], blocks that fit on each GPU.
      cost_model: the machines and what calls cost on them; None where nobody knows.
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


class Placer:
    """Base of placers: frozen dataclasses whose fields are options.

    A subclass sets `name` and `SOURCE` and implements `choose` (what each server
    holds) or `assign` (which GPU holds it).

    Attributes:
      needs: fields of a `Problem` that must not be None.
      follows_statistics: whether other statistics give another placement.
    """

    name: ClassVar[str]
    SOURCE: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    follows_statistics: ClassVar[bool] = True

    def place(
        self,
        frequency_NLE: np.ndarray,
        slots: Sequence[np.ndarray],
        cost_model: CostModel | None = None,
        **context: Any,
    ) -> Placement:
        """`solve`, given the fields of a `Problem`."""
        return self.solve(Problem(frequency_NLE, slots, cost_model, **context))

    def solve(self, problem: Problem) -> Placement:
        """A placement that covers every block within the memory of every GPU.

        Raises:
          ConfigError: the placer is unfit for the problem.
        """
        if reason := self.unfit(problem):
            raise ConfigError(reason)
        placement = self.assign(problem)
        placement.check(problem.slots)
        return placement

    def unfit(self, problem: Problem) -> str | None:
        """Why the placer cannot solve a problem that has a solution; None if it can."""
        for field in self.needs:
            if getattr(problem, field) is None:
                return (
                    f"placer {self.name} needs a {field.replace('_', ' ')}; name a "
                    "cluster, or use optimal"
                )
        return None

    def assign(self, problem: Problem) -> Placement:
        """The choice of `choose`, packed on the GPUs of each server."""
        on_NLE = self.choose(problem)
        load_NLE = served_load(problem.frequency_NLE, on_NLE)
        return Placement(pack(on_NLE, problem.slots, load_NLE, problem.speeds))

    def choose(self, problem: Problem) -> np.ndarray:
        """bool [N, L, E]: what each server holds."""
        raise NotImplementedError
