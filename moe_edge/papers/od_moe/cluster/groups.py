"""Which workers compute which experts of which layer; pure (OD-MoE, section 3.1).

MoE layers are counted through all texts: layer l of step t has count t * L + l, where a
prompt is one step and so is each of its new tokens. Group `count mod G` computes it, so
while one group computes the others load, also from the last layer of a token to the
first of the next. No two steps share a count, so nothing is taken for another text's.
"""

import threading
from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import MoeEdgeError

DECIDED_S = 60.0  # in which the scheduler has looked into all that is suspected


class NoWorkers(MoeEdgeError):
    """All workers are lost."""

    exit_code = 3


def slots_of(top_k: int, workers: int, groups: int) -> int:
    """Slots of a worker: its share of a layer's experts, ceil(k G / W)."""
    return -(-top_k * groups // workers)


class Groups:
    """Workers in groups of equal size; the lost are passed over.

    Attributes:
      alive: workers that are there; replaced, not changed: any thread may read it.
      suspected: workers that this process does not reach; the scheduler will say.
    """

    def __init__(self, workers: int, groups: int, top_k: int):
        self.workers, self.groups = workers, groups
        self.slots = slots_of(top_k, workers, groups)
        self.alive = frozenset(range(workers))
        self.suspected: frozenset[int] = frozenset()
        self._changed = threading.Condition()

    def lose(self, worker: int) -> None:
        """A worker is lost; may be told twice."""
        with self._changed:
            self.alive -= {worker}
            self.suspected -= {worker}
            self._changed.notify_all()

    def suspect(self, worker: int) -> None:
        """A worker is passed over until the scheduler has said what is so."""
        with self._changed:
            self.suspected |= self.alive & {worker}
            self.alive -= {worker}

    def find(self, worker: int) -> None:
        """A suspected worker is there."""
        with self._changed:
            self.alive |= self.suspected & {worker}
            self.suspected -= {worker}
            self._changed.notify_all()

    def _is_decided(self) -> bool:
        return bool(self.alive) or not self.suspected

    def left(self) -> list[int]:
        """Workers that are there; waits while all that may be are suspected.

        Raises:
          NoWorkers: none is.
        """
        with self._changed:
            self._changed.wait_for(self._is_decided, DECIDED_S)
            left = sorted(self.alive)
        if not left:
            raise NoWorkers("all workers are lost; the run cannot continue")
        return left

    def members(self, count: int) -> list[int]:
        """Workers of a layer; of a group that is lost as a whole: all that are left."""
        size, left = self.workers // self.groups, self.left()
        first = count % self.groups * size
        return [worker for worker in left if first <= worker < first + size] or left

    def share(self, count: int, experts: Sequence[int]) -> dict[int, list[int]]:
        """Worker -> experts that it loads, by turns in the order of prediction."""
        return _by_turns(self.members(count), experts)

    def choose(
        self, count: int, chosen: Sequence[int], predicted: Sequence[int]
    ) -> dict[int, int]:
        """Expert -> worker that computes it.

        One that was predicted is where it was loaded; another one goes to the worker
        with most room, in place of a record that it need not have loaded.
        """
        members = self.members(count)
        loaded = {
            expert: worker
            for worker, experts in _by_turns(members, predicted).items()
            for expert in experts
        }
        where = {expert: loaded[expert] for expert in chosen if expert in loaded}
        busy = {worker: 0 for worker in members}
        for worker in where.values():
            busy[worker] += 1
        for expert in chosen:
            if expert not in where:
                worker = min(members, key=busy.__getitem__)
                where[expert] = worker
                busy[worker] += 1
        return where

    def spread(self, num_experts: int) -> np.ndarray:
        """int16 [E]: worker of each expert of a layer of a prompt: all take part."""
        left = np.array(self.left(), np.int16)
        return left[np.arange(num_experts) % len(left)]


def _by_turns(members: list[int], experts: Sequence[int]) -> dict[int, list[int]]:
    return {w: list(experts[i :: len(members)]) for i, w in enumerate(members)}


def longest_load_s(main_s: float, worker_s: float, groups: int) -> float:
    """t_maxload: what a worker's load may last without a stall (section 3.1).

    Args:
      main_s: t_M, of a layer on the main node with its messages.
      worker_s: t_W, of a layer's experts on the workers.
    """
    return groups * main_s + (groups - 1) * worker_s
