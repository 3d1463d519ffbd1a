"""A pass over the requests of an OD-MoE run: what came of it, and whom it needs."""

import numpy as np

from moe_edge.cluster.roles import FIRST, FIRST_WORKER, MAIN, SHADOW
from moe_edge.cluster.scheduler.requests import ClusterRequest, NobodyLeft
from moe_edge.cluster.scheduler.scheduler import Scheduler
from moe_edge.cluster.scheduler.serving import Holders, ServingResult


class Pass(ServingResult):
    """One pass: requests with their tokens, and what every process noted."""

    @property
    def served(self) -> list[ClusterRequest]:
        return [one for one in self.asked if one.done]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Without each request's first token."""
        tokens = sum(len(one.tokens) - 1 for one in self.served)
        seconds = sum(one.times_s[-1] - one.times_s[0] for one in self.served)
        return tokens / seconds if seconds > 0 else None

    @property
    def ttft_s(self) -> float | None:
        """Mean seconds from a request's turn to its first token."""
        found, free_s = [], 0.0
        for one in sorted(self.served, key=lambda one: one.times_s[0]):
            found.append(one.times_s[0] - max(one.arrived_s, free_s))
            free_s = one.times_s[-1]
        return float(np.mean(found)) if found else None

    def facts(self, process: int) -> dict:
        """What a process noted; empty if it is lost."""
        return self.notes.get(process, ({}, {}))[0]


class Helpers(Holders):
    """The main node needs workers, and passes over those that it does not reach."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler

    def apart(self, by: int, who: int) -> int | None:
        """A helper that the main node does not reach, or that does not reach the main
        node, is of no use. Others never need each other: a worker that the shadow does
        not reach loads when it is called."""
        pair, main, shadow = {by, who}, MAIN - FIRST, SHADOW - FIRST
        if main not in pair or by not in (main, shadow):
            return None
        return (pair - {main}).pop()

    def lost(self, server: int) -> None:
        if server == MAIN - FIRST:
            raise NobodyLeft("the main node is lost; the run cannot continue")
        if not self._scheduler.alive_N[FIRST_WORKER - FIRST :].any():
            raise NobodyLeft("all workers are lost; the run cannot continue")
