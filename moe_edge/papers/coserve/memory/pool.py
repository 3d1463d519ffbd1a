"""A pool of experts that differ in size: who is resident, within a budget of bytes.

One an executor. It keeps the account and asks its policy who leaves; who holds the
weights (an engine) or only the time (a simulator) does what it says. An expert counts
from the moment its load begins, so that the memory is there when its bytes come.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError, check_count
from moe_edge.papers.coserve.memory.evict_pool import PoolPolicy, State


class Pool:
    """The resident experts of one executor.

    Attributes:
      budget_bytes: that they may have together; used_bytes: that they have.
      policy: who leaves; state: of it.
      resident: their ids.
    """

    def __init__(
        self,
        budget_bytes: int,
        policy: PoolPolicy,
        sizes: Sequence[int],
        probabilities: Sequence[float],
        preliminaries: Sequence[tuple[int, int]] = (),
    ):
        check_count("budget_bytes", budget_bytes)
        self.budget_bytes, self.policy = budget_bytes, policy
        self.state: State = policy.init(sizes, probabilities, preliminaries)
        self.sizes: list[int] = self.state["bytes_E"].tolist()
        self.resident: set[int] = set()
        self.used_bytes = self._entries = 0

    def __contains__(self, expert: int) -> bool:
        return expert in self.resident

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    def fits(self, expert: int) -> bool:
        """Whether an expert could be here at all."""
        return self.sizes[expert] <= self.budget_bytes

    def enter(self, expert: int, protected: Collection[int] = ()) -> list[int]:
        """Makes room for an expert and takes it in.

        Args:
          protected: resident experts that stay, such as those that compute.
        Returns:
          who left for it.
        Raises:
          CapacityError: it is larger than the budget, or than what may leave;
          ConfigError: it is here already.
        """
        if expert in self.resident:
            raise ConfigError(f"expert {expert} is in the pool already")
        size = self.sizes[expert]
        if size > self.budget_bytes:
            raise CapacityError(
                f"expert {expert} has {size} bytes, the pool {self.budget_bytes}"
            )
        needed = size - self.free_bytes
        leaving = self.policy.victims(self.state, needed, protected)
        for other in leaving:
            self.leave(other)
        self.resident.add(expert)
        self.used_bytes += size
        self._entries += 1
        self.state["resident_E"][expert] = True
        self.state["entered_E"][expert] = self._entries
        return leaving

    def leave(self, expert: int) -> None:
        """Takes an expert out; KeyError: it is not here."""
        self.resident.remove(expert)
        self.used_bytes -= self.sizes[expert]
        self.state["resident_E"][expert] = False

    def touch(self, expert: int, now_s: float) -> None:
        """A resident expert begins to compute."""
        self.state = self.policy.touch(self.state, expert, now_s)


def make_pools(
    budgets: Iterable[int],
    policy: PoolPolicy,
    sizes: Sequence[int],
    probabilities: Sequence[float],
    preliminaries: Sequence[tuple[int, int]] = (),
) -> list[Pool]:
    """Empty pools of a machine's executors, which know together what is coming.

    Args:
      budgets: bytes of each.
    Raises:
      CapacityError: an expert is larger than every pool.
    """
    given = policy, sizes, probabilities, preliminaries
    pools = [Pool(budget, *given) for budget in budgets]
    largest, most = max(sizes), max(pool.budget_bytes for pool in pools)
    if largest > most:
        raise CapacityError(
            f"the largest expert has {largest} bytes, the largest pool {most}; give "
            "one pool as much"
        )
    for pool in pools:
        pool.state["coming_E"] = pools[0].state["coming_E"]
    return pools


def fill(pools: Sequence[Pool], probabilities: Sequence[float]) -> None:
    """Experts by falling probability go round the pools until they are full.

    An expert for which a pool has no room goes to the next one that has; where none
    has, smaller ones may still fit.
    """
    turn = 0
    for expert in np.argsort(-np.asarray(probabilities), kind="stable").tolist():
        for step in range(len(pools)):
            pool = pools[(turn + step) % len(pools)]
            if pool.sizes[expert] <= pool.free_bytes:
                pool.enter(expert)
                turn += step + 1
                break


def fill_by_work(
    pools: Sequence[Pool],
    probabilities: Sequence[float],
    item_s: Sequence[Sequence[float]],
) -> None:
    """As `fill`, but an expert goes where, with it, the least work is to be expected.

    A slow executor would else start with as many of the wanted experts as a fast one,
    and these would be loaded again where it is fast.

    Args:
      item_s: seconds of a request, [pool][expert].
    """
    work_s = [0.0] * len(pools)
    for expert in np.argsort(-np.asarray(probabilities), kind="stable").tolist():
        size = pools[0].sizes[expert]
        room = [n for n, pool in enumerate(pools) if size <= pool.free_bytes]
        if room:
            after_s = {
                n: work_s[n] + probabilities[expert] * item_s[n][expert] for n in room
            }
            n = min(room, key=after_s.__getitem__)
            work_s[n] = after_s[n]
            pools[n].enter(expert)
