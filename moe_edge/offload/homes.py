"""Expert homes: devices with slots of their own, where the experts there are computed.

One cache and one store serve all homes. Slots are numbered through: those of home 0
come first. An expert's home is fixed, or free: it is chosen whenever it is loaded.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np


@dataclasses.dataclass(frozen=True)
class Homes:
    """Who lives where.

    home_LE: int32 [L, E], the home of each block; None: it is free, wherever it is
      loaded.
    slots_N: how many slots each home has.
    """

    home_LE: np.ndarray | None
    slots_N: tuple[int, ...]

    @property
    def is_fixed(self) -> bool:
        return self.home_LE is not None

    def __len__(self) -> int:
        return len(self.slots_N)

    @cached_property
    def first_N(self) -> list[int]:
        """The first slot of each home."""
        return [sum(self.slots_N[:home]) for home in range(len(self))]

    @cached_property
    def home_S(self) -> np.ndarray:
        """int [S]: the home of each slot."""
        return np.repeat(np.arange(len(self)), self.slots_N)

    def split(self, layer: int, experts: Sequence[int]) -> list[list[int]]:
        """Experts of a layer by their fixed home, in their order."""
        parts: list[list[int]] = [[] for _ in self.slots_N]
        for expert in experts:
            parts[self.home_LE[layer, expert]].append(expert)
        return parts

    def local(self, home: int, slots: np.ndarray) -> np.ndarray:
        """int32 slots as a home counts its own, S (as many as it has) for others'."""
        own, count = slots - np.int32(self.first_N[home]), self.slots_N[home]
        return np.where((own >= 0) & (own < count), own, np.int32(count))


def homes_in_turn(num_layers: int, num_experts: int, homes: int) -> np.ndarray:
    """int32 [L, E]: experts take homes in turn, in each layer from the next home on."""
    turn_LE = np.add.outer(np.arange(num_layers), np.arange(num_experts)) % homes
    return turn_LE.astype(np.int32)


def homes_by_counts(counts_LE: np.ndarray, homes: int) -> np.ndarray:
    """int32 [L, E]: homes whose experts were used about equally often, in every layer.

    The most used expert first, each to the home with the least uses so far that has
    room: no home has more than ceil(E / N) experts of a layer.
    """
    L, E = counts_LE.shape
    room, home_LE = -(-E // homes), np.empty((L, E), np.int32)
    for counts_E, home_E in zip(counts_LE, home_LE, strict=True):
        uses_N, held_N = [0] * homes, [0] * homes
        for expert in np.argsort(-counts_E, kind="stable").tolist():
            open_homes = [home for home in range(homes) if held_N[home] < room]
            home = min(open_homes, key=lambda n: (uses_N[n], held_N[n]))
            home_E[expert] = home
            uses_N[home] += int(counts_E[expert])
            held_N[home] += 1
    return home_LE
