"""The exact optimum of Prism's eq. 2: coverage and memory, equal block sizes.

Maximise sum of f[n, i] over what server n holds, with at most `capacity[n]` items on n
and every item somewhere. That is a transportation problem. Without coverage each server
takes its favourites; that is optimal for the items so covered. The other items are then
required one after another, each by the cheapest chain of moves

    item -> server a, a's item j -> server b, ..., a copy that is not needed is dropped

which keeps the solution optimal for all items required so far (successive shortest
paths in the residual network). Only the only copies of items move along a chain: going
on from an item with two copies is never cheaper than dropping one. So the graph has N
nodes, whatever the number of items. Values are scaled to whole numbers: sums are exact
and equal costs cannot make paths go round in circles.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.plug_in import register
from moe_edge.place.greedy import favourites
from moe_edge.place.placer import Placer
from moe_edge.place.problem import Problem

SCALE = 2.0**50  # of the largest value; a path adds at most 2 N of them
FAR = np.int64(2**61)
MOST_SERVERS = 512  # costs of longer chains leave 64 bits


@register
@dataclasses.dataclass(frozen=True)
class Optimal(Placer):
    """The least frequency of remote calls that any placement has."""

    name: ClassVar[str] = "optimal"
    SOURCE: ClassVar[str] = "Prism, eq. 2, solved exactly as a transportation problem"

    def unfit(self, problem: Problem) -> str | None:
        return super().unfit(problem) or too_many(self.name, len(problem.slots))

    def choose(self, problem: Problem) -> np.ndarray:
        N = len(problem.frequency_NLE)
        value_NM = problem.frequency_NLE.reshape(N, -1)
        on_NM = best_cover(value_NM, problem.capacity_N)
        return on_NM.reshape(problem.frequency_NLE.shape)


def objective(frequency_NLE: np.ndarray, on_NLE: np.ndarray) -> float:
    """Frequency of the calls that leave their server: sum of f[n, l, e] if e not on n.

    Args:
      frequency_NLE: [N, L, E], how often server N calls block E of layer L.
      on_NLE: bool [N, L, E], the server holds the block.
    Source: Prism, eq. 2.
    """
    return float(np.where(on_NLE, 0.0, frequency_NLE).sum())


def too_many(placer: str, servers: int) -> str | None:
    """Why a placer that begins with the optimum refuses so many, or None."""
    if servers <= MOST_SERVERS:
        return None
    return (
        f"placer {placer} solves for at most {MOST_SERVERS} servers, got {servers}; "
        "use prism"
    )


def best_cover(value_NM: np.ndarray, capacity_N: np.ndarray) -> np.ndarray:
    """bool [N, M] that holds every item and has the largest total value.

    Args:
      value_NM: from 0, of item M at server N.
      capacity_N: items that a server takes, at most M; in all at least M.
    """
    largest = float(value_NM.max())
    whole_NM = np.rint(value_NM * (SCALE / (largest or 1.0))).astype(np.int64)
    on_NM = favourites(whole_NM, capacity_N)
    chains = _Chains(whole_NM, on_NM)
    for item in np.flatnonzero(chains.copies_M == 0):
        chains.require(int(item))
    return on_NM


class _Chains:
    """The residual network between servers, kept up to date.

    Attributes:
      drop_N, drop_item_N: the cheapest copy that server N may drop, and which.
      move_NN, move_item_NN: the cheapest only copy on N to move to another server.
    """

    def __init__(self, value_NM: np.ndarray, on_NM: np.ndarray):
        N = len(value_NM)
        self.value_NM, self.on_NM = value_NM, on_NM
        self.copies_M = on_NM.sum(axis=0)
        self.drop_N = np.full(N, FAR)
        self.drop_item_N = np.zeros(N, np.int64)
        self.move_NN = np.full((N, N), FAR)
        self.move_item_NN = np.zeros((N, N), np.int64)
        for server in range(N):
            self._refresh(server)

    def require(self, item: int) -> None:
        """Puts a missing item where the chain that makes room costs least."""
        cost_N, next_N = self._cheapest_chains()
        server = int((cost_N - self.value_NM[:, item]).argmin())
        changed = set()
        while True:
            changed.add(server)
            self.on_NM[server, item] = True
            self.copies_M[item] += 1
            after = int(next_N[server])
            last = after < 0
            item = int(
                self.drop_item_N[server] if last else self.move_item_NN[server, after]
            )
            self.on_NM[server, item] = False
            self.copies_M[item] -= 1
            if last:
                break
            server = after
        if self.copies_M[item] == 1:  # its last holder may no longer drop it
            changed.add(int(self.on_NM[:, item].argmax()))
        for server in changed:
            self._refresh(server)

    def _cheapest_chains(self) -> tuple[np.ndarray, np.ndarray]:
        """Cost of making room on each server, and the next server (-1: drop)."""
        cost_N = self.drop_N.copy()
        next_N = np.full(len(cost_N), -1)
        open_N = np.arange(len(cost_N))
        rows = open_N
        while len(open_N):  # Bellman-Ford; only through servers that became cheaper
            through_NX = self.move_NN[:, open_N] + cost_N[open_N]
            best_N = through_NX.argmin(axis=1)
            found_N = through_NX[rows, best_N]
            better_N = found_N < cost_N
            cost_N[better_N] = found_N[better_N]
            next_N[better_N] = open_N[best_N[better_N]]
            open_N = np.flatnonzero(better_N)
        return cost_N, next_N

    def _refresh(self, server: int) -> None:
        """Recomputes what `server` may drop and move."""
        held = np.flatnonzero(self.on_NM[server])
        value = self.value_NM[server, held]
        spare = self.copies_M[held] > 1
        self.drop_N[server] = FAR
        if spare.any():
            best = int(np.where(spare, value, FAR).argmin())
            self.drop_N[server] = value[best]
            self.drop_item_N[server] = held[best]
        only = held[~spare]
        self.move_NN[server] = FAR
        if len(only):
            loss_NX = self.value_NM[server, only] - self.value_NM[:, only]
            best_N = loss_NX.argmin(axis=1)
            self.move_NN[server] = loss_NX[np.arange(len(loss_NX)), best_N]
            self.move_item_NN[server] = only[best_N]
        self.move_NN[server, server] = FAR
