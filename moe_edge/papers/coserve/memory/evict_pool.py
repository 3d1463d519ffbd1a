"""Which experts leave a pool of bytes: policies for experts that differ in size.

A policy is three functions over a dict of arrays. Axes: E experts, D dependencies.
Management runs on the host, beside a load that takes milliseconds: NumPy, no JAX.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError, check_known

# bytes_E, probability_E, resident_E, entered_E (number of entry), last_E (seconds of
# the last use), waiting_E (requests that wait here), coming_E (requests that wait
# anywhere for an expert which this one may follow), edges_D2 (preliminary, subsequent)
State = dict[str, Any]


class PoolPolicy:
    """Base of the policies: experts leave in the order of `keys` until it is enough."""

    name: ClassVar[str]
    SOURCE: ClassVar[str]

    def init(
        self,
        sizes: Sequence[int],
        probabilities: Sequence[float],
        preliminaries: Sequence[tuple[int, int]],
    ) -> State:
        """State of an empty pool.

        Args:
          sizes: bytes of each expert; probabilities: uses of each, a request.
          preliminaries: pairs (preliminary, subsequent) of experts.
        Raises:
          ConfigError: not one size and probability each, or a pair of other experts.
        """
        bytes_E = np.asarray(sizes, np.int64)
        probability_E = np.asarray(probabilities, np.float64)
        edges_D2 = np.asarray(list(preliminaries), np.int64).reshape(-1, 2)
        E = len(bytes_E)
        if probability_E.shape != (E,) or bytes_E.min(initial=1) < 1:
            raise ConfigError(
                f"{E} sizes, the least {bytes_E.min(initial=1)} bytes, and "
                f"{probability_E.size} probabilities; expected as many, sizes from 1 on"
            )
        if edges_D2.size and not 0 <= edges_D2.min() <= edges_D2.max() < E:
            raise ConfigError(
                f"dependencies name experts {edges_D2.min()} to {edges_D2.max()}, "
                f"expected 0 to {E - 1}"
            )
        return {
            "bytes_E": bytes_E,
            "probability_E": probability_E,
            "resident_E": np.zeros(E, bool),
            "entered_E": np.zeros(E, np.int64),
            "last_E": np.full(E, -np.inf),
            "waiting_E": np.zeros(E, np.int64),
            "coming_E": np.zeros(E, np.int64),
            "edges_D2": edges_D2,
        }

    def touch(self, state: State, expert: int, now_s: float) -> State:
        """An expert begins to compute."""
        state["last_E"][expert] = now_s
        return state

    def victims(
        self, state: State, needed_bytes: int, protected: Collection[int] = ()
    ) -> list[int]:
        """Experts that leave, in this order, so that so many bytes become free.

        Args:
          protected: resident experts that stay.
        Raises:
          CapacityError: all others together are too small.
        """
        if needed_bytes <= 0:
            return []
        resident_E = state["resident_E"]
        if protected:
            resident_E = resident_E.copy()
            resident_E[list(protected)] = False
        ids = np.flatnonzero(resident_E)
        ids = ids[np.lexsort(self.keys(state, ids)[::-1])]
        freed = np.cumsum(state["bytes_E"][ids])
        if not ids.size or freed[-1] < needed_bytes:
            raise CapacityError(
                f"{needed_bytes} bytes are needed; the {ids.size} experts that may "
                f"leave hold {freed[-1] if ids.size else 0}"
            )
        return ids[: np.searchsorted(freed, needed_bytes) + 1].tolist()

    def keys(self, state: State, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        """What resident experts are sorted by, the first key first; least leaves."""
        raise NotImplementedError


def waited_for(state: State, ids: np.ndarray) -> np.ndarray:
    """Whether requests wait for each expert, or for one that it may follow."""
    return (state["waiting_E"][ids] > 0) | (state["coming_E"][ids] > 0)


@dataclasses.dataclass(frozen=True)
class PoolLru(PoolPolicy):
    """Least recently used first; of those never used the least probable."""

    name: ClassVar[str] = "lru"
    SOURCE: ClassVar[str] = "Samba-CoE (SN40L, MICRO 2024), as CoServe section 5.1 says"

    def keys(self, state: State, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        return state["last_E"][ids], state["probability_E"][ids]


@dataclasses.dataclass(frozen=True)
class PoolFifo(PoolPolicy):
    """In the order of entry."""

    name: ClassVar[str] = "fifo"
    SOURCE: ClassVar[str] = "CoServe, section 5.1: Samba-CoE FIFO"

    def keys(self, state: State, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        return (state["entered_E"][ids],)


@dataclasses.dataclass(frozen=True)
class PoolCoServe(PoolPolicy):
    """First subsequent experts without a resident preliminary one, the largest first;
    then all others, the least probable first."""

    name: ClassVar[str] = "coserve"
    SOURCE: ClassVar[str] = "CoServe, section 4.3: two-stage eviction"

    def keys(self, state: State, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        before_D, after_D = state["edges_D2"].T
        alone_E = np.zeros(len(state["bytes_E"]), bool)
        alone_E[after_D] = True
        alone_E[after_D[state["resident_E"][before_D]]] = False
        alone = alone_E[ids]
        probability = state["probability_E"][ids]
        by_size = np.where(alone, -state["bytes_E"][ids], 0)
        return ~alone, by_size, probability


@dataclasses.dataclass(frozen=True)
class PoolCoServeQueued(PoolCoServe):
    """The two stages among experts that no request waits for, then among the others."""

    name: ClassVar[str] = "coserve_queued"
    SOURCE: ClassVar[str] = "ours: CoServe, section 4.3, behind what the queues know"

    def keys(self, state: State, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        return waited_for(state, ids), *super().keys(state, ids)


@dataclasses.dataclass(frozen=True)
class PoolQueued(PoolPolicy):
    """What requests wait for, or may follow to, goes last; then by probability."""

    name: ClassVar[str] = "queued"
    SOURCE: ClassVar[str] = "ours: CoServe's probabilities behind what the queues know"

    def keys(self, state: State, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        return waited_for(state, ids), state["probability_E"][ids]


@dataclasses.dataclass(frozen=True)
class PoolBelady(PoolPolicy):
    """What is used latest leaves first. Only a simulator knows.

    Attributes:
      uses: experts in the order in which this pool will be touched.
    """

    name: ClassVar[str] = "belady"
    SOURCE: ClassVar[str] = "Belady 1966; a bound for one order of requests"
    uses: Sequence[int] = ()

    def init(self, sizes, probabilities, preliminaries) -> State:
        state = super().init(sizes, probabilities, preliminaries)
        check_uses(self.uses, len(state["bytes_E"]))
        next_T, first_E = next_uses(self.uses, len(state["bytes_E"]))
        next_T = np.append(next_T, len(self.uses))  # after the last use there is none
        return state | {"next_T": next_T, "next_E": first_E}

    def touch(self, state: State, expert: int, now_s: float) -> State:
        state["next_E"][expert] = state["next_T"][state["next_E"][expert]]
        return super().touch(state, expert, now_s)

    def keys(self, state: State, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        return -state["next_E"][ids], state["probability_E"][ids]


def check_uses(uses: Sequence[int], num_experts: int) -> None:
    """Raises ConfigError unless all uses are of experts 0 to num_experts - 1."""
    if len(uses) and not 0 <= min(uses) <= max(uses) < num_experts:
        raise ConfigError(
            f"uses are of experts {min(uses)} to {max(uses)}, expected 0 to "
            f"{num_experts - 1}"
        )


def next_uses(uses: Sequence[int], num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T]: place of the next use of the same expert, T if none; and int64 [E]:
    place of its first use, T if none."""
    T = len(uses)
    first_E = np.full(num_experts, T)
    next_T = np.empty(T, np.int64)
    for time in range(T - 1, -1, -1):
        next_T[time] = first_E[uses[time]]
        first_E[uses[time]] = time
    return next_T, first_E


POOL_POLICIES: dict[str, type[PoolPolicy]] = {
    kind.name: kind
    for kind in (
        *(PoolLru, PoolFifo, PoolCoServe),
        *(PoolCoServeQueued, PoolQueued, PoolBelady),
    )
}


def get_pool_policy(name: str) -> PoolPolicy:
    """The policy of that name, Belady's excepted; ConfigError: unknown."""
    known = {k: kind for k, kind in POOL_POLICIES.items() if kind is not PoolBelady}
    check_known("pool policy", name, known)
    return known[name]()
