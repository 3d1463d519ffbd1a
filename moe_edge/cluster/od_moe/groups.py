"""Which workers compute which experts of which layer; pure (OD-MoE, section 3.1).

MoE layers are counted through a whole text: layer l of decode step t (the first is 0)
has count t * L + l. Group `count mod G` computes it, so while one group computes the
others load, also from the last layer of a token to the first of the next.
"""

from collections.abc import Sequence

import numpy as np


def slots_of(top_k: int, workers: int, groups: int) -> int:
    """Slots of a worker: its share of a layer's experts, ceil(k G / W)."""
    return -(-top_k * groups // workers)


class Groups:
    """Workers in groups of equal size; the lost are passed over.

    Attributes:
      alive: workers that are there.
    """

    def __init__(self, workers: int, groups: int, top_k: int):
        self.workers, self.groups = workers, groups
        self.slots = slots_of(top_k, workers, groups)
        self.alive = set(range(workers))

    def members(self, count: int) -> list[int]:
        """Workers of a layer; of a group that is lost as a whole: all that are left."""
        size = self.workers // self.groups
        first = count % self.groups * size
        mine = [w for w in range(first, first + size) if w in self.alive]
        return mine or sorted(self.alive)

    def share(self, count: int, experts: Sequence[int]) -> dict[int, list[int]]:
        """Worker -> experts that it loads, by turns in the order of prediction."""
        members = self.members(count)
        shared: dict[int, list[int]] = {worker: [] for worker in members}
        for place, expert in enumerate(experts):
            shared[members[place % len(members)]].append(expert)
        return shared

    def choose(
        self, count: int, chosen: Sequence[int], predicted: Sequence[int]
    ) -> dict[int, int]:
        """Expert -> worker that computes it.

        One that was predicted is where it was loaded; another one goes to the worker
        with most room: what it loaded in vain makes way.
        """
        loaded = {
            expert: worker
            for worker, experts in self.share(count, predicted).items()
            for expert in experts
        }
        where = {expert: loaded[expert] for expert in chosen if expert in loaded}
        members = self.members(count)
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
        alive = np.array(sorted(self.alive), np.int16)
        return alive[np.arange(num_experts) % len(alive)]


def longest_load_s(main_s: float, worker_s: float, groups: int) -> float:
    """t_maxload: what a worker's load may last without a stall (section 3.1).

    Args:
      main_s: t_M, of a layer on the main node with its messages.
      worker_s: t_W, of a layer's experts on the workers.
    """
    return groups * main_s + (groups - 1) * worker_s
