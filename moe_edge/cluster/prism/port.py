"""What the table of a run, its routes and its judge need of the scheduler."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np


class Port(Protocol):
    """The servers: who is there, what they may hold, and how they are spoken to.

    Attributes:
      slots_N: blocks that each server may hold, its spare one among them.
      moe_layers: of the model; tables count these only.
    """

    slots_N: np.ndarray
    moe_layers: list[int]

    @property
    def alive_N(self) -> np.ndarray:
        """bool: who is on the list."""

    @property
    def alive(self) -> list[int]:
        """Their numbers."""

    @property
    def bad_pairs(self) -> Collection[tuple[int, int]]:
        """(by, who): living servers that do not reach each other."""

    def full(self, array_NLE: np.ndarray, empty: int = 0) -> np.ndarray:
        """[..., L of MoE layers, E] -> [..., all layers, E]."""

    def tell(self, server: int, name: str, fields: dict, arrays: Mapping) -> Any:
        """Gives a server an order; it takes them in turn."""

    def ask(self, server: int, name: str, within_s: float) -> tuple | None:
        """(fields, arrays) of its answer; None: there is none."""

    def prepare_return(self, server: int, fields: dict, arrays: Mapping) -> None:
        """Has a lost server prepare for the run."""
