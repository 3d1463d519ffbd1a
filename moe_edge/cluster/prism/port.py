"""What the table of a run and its judge need of the scheduler."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from moe_edge.cluster.scheduler.accusations import Accusations
from moe_edge.cluster.scheduler.returning import Returning


class Port(Protocol):
    """The servers: who is there, what they may hold, and how they are spoken to.

    Attributes:
      slots_N: blocks that each server may hold, its spare one among them.
      shape_LE: layers of the model and blocks of each; moe_layers: those with experts,
        which tables count.
      accusations: and pairs of living servers that do not reach each other.
      returning: lost servers that come back.
      alive_N: bool, who is on the list.
    """

    slots_N: np.ndarray
    shape_LE: tuple[int, int]
    moe_layers: list[int]
    accusations: Accusations
    returning: Returning
    alive_N: np.ndarray

    @property
    def alive(self) -> list[int]:
        """Their numbers."""

    def tell(self, server: int, name: str, fields: dict, arrays: Mapping) -> Any:
        """Gives a server an order; it takes them in turn."""

    def ask(self, server: int, name: str, within_s: float) -> tuple | None:
        """(fields, arrays) of its answer; None: there is none."""
