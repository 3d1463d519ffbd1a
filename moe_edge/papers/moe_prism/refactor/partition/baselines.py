"""Partitions without a search, and with a complete one where it is small."""

import heapq
import itertools
import math

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.papers.moe_prism.refactor.partition.objective import (
    grouped_sums,
    smallest,
)
from moe_edge.papers.moe_prism.refactor.partition.problem import Problem

MAX_PARTITIONS = 100_000  # that brute force looks at: a few seconds
_CHUNK = 1024  # partitions evaluated together


def random(problem: Problem, *, seed: int = 0) -> np.ndarray:
    """Labels drawn by chance, int64 [F]."""
    return np.random.default_rng(seed).permutation(contiguous(problem))


def contiguous(problem: Problem) -> np.ndarray:
    """Neurons in the order they are stored, int64 [F]."""
    return np.repeat(np.arange(problem.subs), problem.neurons // problem.subs)


def magnitude(problem: Problem) -> np.ndarray:
    """Neurons sorted by total magnitude, loudest first: static pruning; int64 [F]."""
    return sorted_labels(problem.mass_F, problem.subs)


def sorted_labels(mass_F, subs: int) -> np.ndarray:
    """Neurons with the largest values in sub-expert 0, and so on; int64 [F]."""
    labels_F = np.empty(len(mass_F), np.int64)
    order_F = np.argsort(-np.asarray(mass_F), kind="stable")
    labels_F[order_F] = np.repeat(np.arange(subs), len(mass_F) // subs)
    return labels_F


def greedy(problem: Problem) -> np.ndarray:
    """The loudest unassigned neuron to the open sub-expert with the least load.

    Balances the load, so it starts the annealing no better than chance would.

    Source: MoE-Prism, section 4.2.2.
    """
    size = problem.neurons // problem.subs
    labels_F = np.empty(problem.neurons, np.int64)
    open_subs = [(0.0, sub, size) for sub in range(problem.subs)]
    for neuron in np.argsort(-problem.mass_F, kind="stable").tolist():
        load, sub, room = open_subs[0]
        labels_F[neuron] = sub
        if room > 1:
            heapq.heapreplace(open_subs, (load + problem.mass_F[neuron], sub, room - 1))
        else:
            heapq.heappop(open_subs)
    return labels_F


def num_partitions(neurons: int, subs: int) -> int:
    """Partitions into equal sub-experts that are not told apart."""
    size = neurons // subs
    ordered = math.factorial(neurons) // math.factorial(size) ** subs
    return ordered // math.factorial(subs)


def brute_force(problem: Problem) -> np.ndarray:
    """The optimum, by looking at every partition; int64 [F].

    Raises:
      ConfigError: more than MAX_PARTITIONS of them.
    """
    count = num_partitions(problem.neurons, problem.subs)
    if count > MAX_PARTITIONS:
        raise ConfigError(
            f"brute_force would look at {count:.3g} partitions of {problem.neurons} "
            f"neurons, at most {MAX_PARTITIONS}; use solver alternate"
        )
    best_cost, best_F = np.inf, None
    partitions = _partitions(problem.neurons, problem.subs)
    while chunk := list(itertools.islice(partitions, _CHUNK)):
        labels_RF = np.array(chunk)
        norms_URT = grouped_sums(problem.A_TF, labels_RF, problem.subs)
        low_URT = smallest(norms_URT, problem.inactive)
        cost_R = np.where(low_URT, norms_URT, 0).sum((0, 2), dtype=np.float64)
        if cost_R.min() < best_cost:
            best_cost, best_F = cost_R.min(), labels_RF[cost_R.argmin()]
    return best_F


def _partitions(neurons: int, subs: int):
    """Labels of every partition once: a sub-expert opens with the first free neuron."""
    labels = [-1] * neurons

    def fill(sub: int):
        if sub == subs:
            yield tuple(labels)
            return
        first, *free = [f for f in range(neurons) if labels[f] < 0]
        for others in itertools.combinations(free, neurons // subs - 1):
            for neuron in (first, *others):
                labels[neuron] = sub
            yield from fill(sub + 1)
            for neuron in (first, *others):
                labels[neuron] = -1

    yield from fill(0)
