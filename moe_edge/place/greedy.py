"""Favourites over all layers at once, then the cheapest repairs of coverage."""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.plug_in import register
from moe_edge.place.placer import Placer
from moe_edge.place.problem import Problem


@register
@dataclasses.dataclass(frozen=True)
class Greedy(Placer):
    """Each server its most called blocks of any layer; missing ones where cheapest."""

    name: ClassVar[str] = "greedy"
    SOURCE: ClassVar[str] = "ours: the first step of the optimum, repaired greedily"

    def choose(self, problem: Problem) -> np.ndarray:
        N = len(problem.frequency_NLE)
        frequency_NM = problem.frequency_NLE.reshape(N, -1)
        on_NM = favourites(frequency_NM, problem.capacity_N)
        cover_greedily(frequency_NM, on_NM)
        return on_NM.reshape(problem.frequency_NLE.shape)


def favourites(value_NM: np.ndarray, capacity_N: np.ndarray) -> np.ndarray:
    """bool [N, M]: so many most valuable items of each server; the first of equals."""
    order_NM = np.argsort(-value_NM, axis=1, kind="stable")
    on_NM = np.zeros(value_NM.shape, bool)
    for on_M, order_M, capacity in zip(on_NM, order_NM, capacity_N, strict=True):
        on_M[order_M[:capacity]] = True
    return on_NM


def cover_greedily(value_NM: np.ndarray, on_NM: np.ndarray) -> None:
    """Puts every missing item over the copy whose server loses least, in place.

    The most valuable missing item chooses first. As long as items are missing and the
    servers' capacities hold all items once, some item has two copies.
    """
    copies_M = on_NM.sum(axis=0)
    missing = np.flatnonzero(copies_M == 0)
    missing = missing[np.argsort(-value_NM[:, missing].max(axis=0), kind="stable")]
    spare_NM = np.where(on_NM & (copies_M > 1), value_NM, np.inf)
    old_N, servers = spare_NM.argmin(axis=1), np.arange(len(spare_NM))
    for new in missing:
        loss_N = spare_NM[servers, old_N]
        server = int((loss_N - value_NM[:, new]).argmin())
        old = int(old_N[server])
        on_NM[server, old], on_NM[server, new] = False, True
        spare_NM[server, old] = np.inf
        copies_M[[old, new]] += (-1, 1)
        if copies_M[old] == 1:
            spare_NM[:, old] = np.inf
        stale = np.flatnonzero((old_N == old) | (servers == server))
        old_N[stale] = spare_NM[stale].argmin(axis=1)
