"""Prism's own placer: Algorithm 1 (how many), Algorithm 2 (which)."""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.plug_in import register
from moe_edge.place.greedy import favourites
from moe_edge.place.pack import share_out
from moe_edge.place.placer import Placer
from moe_edge.place.problem import Problem


@register
@dataclasses.dataclass(frozen=True)
class Prism(Placer):
    """Entropy decides how many blocks of a layer, frequency which.

    Differs from the printed algorithms, whose loops need not end and lose memory:
    slots that the floor drops are handed out; no server gets more than E of a layer;
    servers give only from layers that have more than E in all; layers of equal
    entropy share equally if all entropies are 0; servers without duplicates are
    skipped. With that both algorithms end, in a placement that covers every block,
    wherever memory holds one copy of the model.
    """

    name: ClassVar[str] = "prism"
    SOURCE: ClassVar[str] = "Prism, algorithms 1 and 2"

    def choose(self, problem: Problem) -> np.ndarray:
        count_NL = allocate_counts(problem.frequency_NLE, problem.capacity_N)
        return assign_blocks(problem.frequency_NLE, count_NL)


def allocate_counts(frequency_NLE: np.ndarray, capacity_N: np.ndarray) -> np.ndarray:
    """int64 [N, L]: blocks of each layer on each server; every layer at least E.

    `capacity_N`: blocks that a server holds, at most L * E.
    """
    E = frequency_NLE.shape[2]
    entropy_NL = layer_entropy(frequency_NLE)
    entropy_NL[entropy_NL.sum(axis=1) == 0] = 1.0
    count_NL = np.stack(
        [share_out(int(c), v, E) for c, v in zip(capacity_N, entropy_NL, strict=True)]
    )
    rebalance_counts(count_NL, capacity_N, E)
    return count_NL


def layer_entropy(frequency_NLE: np.ndarray) -> np.ndarray:
    """float64 [N, L], bits."""
    share_NLE = frequency_NLE / frequency_NLE.sum(axis=-1, keepdims=True)
    safe_NLE = np.where(share_NLE > 0, share_NLE, 1.0)
    return np.maximum(-(share_NLE * np.log2(safe_NLE)).sum(axis=-1), 0.0)


def rebalance_counts(count_NL: np.ndarray, capacity_N: np.ndarray, experts: int):
    """Algorithm 1, step 2, in place: moves slots to layers with fewer than `experts`.

    Servers by memory, descending; each moves a slot from the fullest layer in which
    it has one. A short layer has room on every server and some layer has too many, so
    each round moves at least one slot.
    """
    total_L = count_NL.sum(axis=0)
    order = np.argsort(-capacity_N, kind="stable")
    for layer in range(count_NL.shape[1]):
        while total_L[layer] < experts:
            for server in order:
                rich_L = np.where(count_NL[server] > 0, total_L, 0)
                donor = int(rich_L.argmax())
                if rich_L[donor] > experts:
                    count_NL[server, [donor, layer]] += (-1, 1)
                    total_L[[donor, layer]] += (-1, 1)
                    if total_L[layer] == experts:
                        break


def assign_blocks(frequency_NLE: np.ndarray, count_NL: np.ndarray) -> np.ndarray:
    """bool [N, L, E]: Algorithm 2, the favourites, then cover by the fewest copied.

    `count_NL`: blocks of each layer on each server; every layer at least E.
    """
    E = frequency_NLE.shape[2]
    on_XE = favourites(frequency_NLE.reshape(-1, E), count_NL.ravel())
    on_NLE = on_XE.reshape(frequency_NLE.shape)
    for layer in range(count_NL.shape[1]):
        _cover_layer(on_NLE[:, layer], frequency_NLE[:, layer])
    return on_NLE


def _cover_layer(on_NE: np.ndarray, frequency_NE: np.ndarray) -> None:
    """In place. Ends: while a block is missing some block has two copies."""
    copies_E = on_NE.sum(axis=0)
    while (copies_E == 0).any():
        duplicates_N = (on_NE & (copies_E > 1)).sum(axis=1)
        for server in np.argsort(duplicates_N, kind="stable"):
            spare_E = on_NE[server] & (copies_E > 1)
            missing_E = copies_E == 0
            if spare_E.any() and missing_E.any():
                wanted_E = np.where(missing_E, frequency_NE[server], -1.0)
                new = int(wanted_E.argmax())
                old = int(np.where(spare_E, frequency_NE[server], np.inf).argmin())
                on_NE[server, [old, new]] = (False, True)
                copies_E[[old, new]] += (-1, 1)
