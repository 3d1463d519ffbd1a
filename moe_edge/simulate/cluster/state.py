"""What the cluster loop remembers of its servers and requests, and its options."""

import dataclasses
from collections import deque
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import check_count, check_from_zero, check_positive
from moe_edge.simulate.cluster.calls import StepCalls
from moe_edge.workload.requests import Request


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How servers batch and what is recorded.

    Attributes:
      max_batch: requests that a server runs at a time; 1 serves one after another, as
        Prism's basis (MoE-Infinity's generate) does.
      window_s: width of the windows of the local compute ratio.
      timeline_s: spans that begin before this are kept.
    """

    max_batch: int = 1
    window_s: float = 60.0
    timeline_s: float = 0.0

    def __post_init__(self):
        check_count("max_batch", self.max_batch)
        check_positive("window_s", self.window_s)
        check_from_zero("timeline_s", self.timeline_s)


class Running:
    """A request inside a server: where its routing is, how far it is."""

    __slots__ = ("number", "row", "left", "prompt", "fresh")

    def __init__(self, number: int, row: int, request: Request):
        self.number, self.row = number, row
        self.prompt, self.left = request.input_tokens, request.output_tokens
        self.fresh = True  # in its first step


class Ahead(NamedTuple):
    """Steps that were planned together: a request's next tokens, while it is alone."""

    number: int
    version: int
    steps: deque[StepCalls]


class ServerState:
    """What a server is doing."""

    __slots__ = (
        *("waiting", "running", "promised", "ahead"),
        *("calls", "cells", "dense_s", "layer", "end_s", "pending"),
    )

    def __init__(self):
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.ahead: Ahead | None = None
        self.calls: StepCalls | None = None
        self.cells: np.ndarray | None = None
        self.promised = self.layer = self.pending = 0
        self.end_s = self.dense_s = 0.0

    @property
    def idle(self) -> bool:
        """Nothing to do, and nothing on its way here."""
        return not (self.running or self.waiting or self.promised)
