"""The baselines of Prism's table II without replication logic of their own."""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.plug_in import register
from moe_edge.place.pack import share_out
from moe_edge.place.placer import Placer
from moe_edge.place.plan import ABSENT, Placement
from moe_edge.place.problem import Problem


def gpu_list(slots) -> tuple[np.ndarray, np.ndarray]:
    """Server [D] and GPU-in-server [D] of all GPUs in a row."""
    server_D = np.repeat(np.arange(len(slots)), [len(slots_G) for slots_G in slots])
    return server_D, np.concatenate([np.arange(len(slots_G)) for slots_G in slots])


def layer_slots(quota_D: np.ndarray, layers: int) -> np.ndarray:
    """int64 [L, D]: every GPU's quota over the layers, layer totals within one.

    Each GPU gives each layer the same number, and what is left to the layers that
    have least so far; so totals never differ by more than one.
    """
    slots_LD = np.tile(quota_D // layers, (layers, 1))
    total_L = np.zeros(layers, np.int64)
    for gpu, rest in enumerate(quota_D % layers):
        poorest = np.argsort(total_L, kind="stable")[:rest]
        slots_LD[poorest, gpu] += 1
        total_L[poorest] += 1
    return slots_LD


def single_copy_slots(problem: Problem) -> np.ndarray:
    """int64 [L, D]: room for exactly one copy of each layer, equal where memory is."""
    L, E = problem.frequency_NLE.shape[1:]
    limit_D = np.concatenate(problem.slots)
    return layer_slots(share_out(L * E, np.ones(len(limit_D)), limit_D), L)


def owned(owner_LE: np.ndarray, slots) -> np.ndarray:
    """int8 [N, L, E] of one copy a block, each on the GPU (of all in a row) given."""
    server_D, gpu_D = gpu_list(slots)
    gpu_NLE = np.full((len(slots), *owner_LE.shape), ABSENT, np.int8)
    owner_1LE = owner_LE[None]
    np.put_along_axis(gpu_NLE, server_D[owner_1LE], gpu_D[owner_1LE], axis=0)
    return gpu_NLE


def random_single_copy(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """int8 [N, L, E]: each GPU holds an equal number of random blocks, no copies."""
    shares = single_copy_slots(problem)
    gpus = [np.repeat(np.arange(len(slots_D)), slots_D) for slots_D in shares]
    return owned(np.stack([rng.permutation(gpu_E) for gpu_E in gpus]), problem.slots)


@register
@dataclasses.dataclass(frozen=True)
class Uniform(Placer):
    """E / GPUs random blocks of every layer on each GPU, no copies.

    A GPU too small for its equal share is filled, and the others share the rest.
    """

    name: ClassVar[str] = "uniform"
    SOURCE: ClassVar[str] = "Prism, section IV-A, after Megatron-LM"
    follows_statistics: ClassVar[bool] = False

    def assign(self, problem: Problem) -> Placement:
        rng = np.random.default_rng(problem.seed)
        return Placement(random_single_copy(problem, rng))


@register
@dataclasses.dataclass(frozen=True)
class Redundance(Placer):
    """Random blocks up to each GPU's capacity.

    One copy of everything comes first (as Uniform), so that every block is covered,
    which the paper does not say.
    """

    name: ClassVar[str] = "redundance"
    SOURCE: ClassVar[str] = "Prism, section IV-A"
    follows_statistics: ClassVar[bool] = False

    def assign(self, problem: Problem) -> Placement:
        rng = np.random.default_rng(problem.seed)
        gpu_NLE = random_single_copy(problem, rng)
        for gpu_LE, slots_G in zip(gpu_NLE, problem.slots, strict=True):
            for gpu, slots in enumerate(slots_G):
                absent = np.flatnonzero(gpu_LE == ABSENT)
                free = min(slots - (gpu_LE == gpu).sum(), len(absent))
                np.put(gpu_LE, rng.choice(absent, free, replace=False), gpu)
        return Placement(gpu_NLE)


@register
@dataclasses.dataclass(frozen=True)
class SmartMoe(Placer):
    """One copy a block, equal slots a GPU, the busiest blocks to the idlest GPUs.

    A tie keeps the block where it is if that GPU is among the least loaded, else takes
    the first. A layer changes only if its largest load becomes lower; then each GPU
    holds as many of it as now.
    """

    name: ClassVar[str] = "smartmoe"
    SOURCE: ClassVar[str] = "SmartMoE, ATC 2023, its placement of experts"

    def assign(self, problem: Problem) -> Placement:
        load_LE = problem.frequency_NLE.sum(axis=0)
        slots_LD = single_copy_slots(problem)
        now_LE = self._current(problem, slots_LD)
        if now_LE is not None:
            slots_LD = _used(now_LE, slots_LD.shape[1])
        now = [None] * len(load_LE) if now_LE is None else now_LE
        layers = zip(load_LE, slots_LD, now, strict=True)
        owner_LE = np.stack([balance(*layer) for layer in layers])
        return Placement(owned(owner_LE, problem.slots))

    @staticmethod
    def _current(problem: Problem, slots_LD: np.ndarray) -> np.ndarray | None:
        """int64 [L, E], the GPU of each block now, if there is one copy of each.

        Every server must hold its share of every layer; which GPU of it holds how many
        may differ (`migrate.settle`), and stays as it is.
        """
        if problem.current is None or (problem.current.copies_LE != 1).any():
            return None
        server_D, gpu_D = gpu_list(problem.slots)
        first_N = np.flatnonzero(gpu_D == 0)
        server_LE = problem.current.on_NLE.argmax(axis=0)
        now_LE = first_N[server_LE] + problem.current.gpu_NLE.max(axis=0)
        server_DN = server_D[:, None] == np.arange(len(problem.slots))
        used_LD = _used(now_LE, len(server_D))
        same = (used_LD @ server_DN == slots_LD @ server_DN).all()
        held_D = np.concatenate(problem.slots)
        return now_LE if same and (used_LD.sum(axis=0) <= held_D).all() else None


def _used(now_LE: np.ndarray, gpus: int) -> np.ndarray:
    """int64 [L, D]: blocks of each layer on each of so many GPUs."""
    return np.stack([np.bincount(now_E, minlength=gpus) for now_E in now_LE])


def balance(
    load_E: np.ndarray, slots_D: np.ndarray, now_E: np.ndarray | None = None
) -> np.ndarray:
    """int64 [E]: SmartMoE's GPU of each block of a layer, heaviest first.

    `slots_D`: blocks that each GPU takes; `now_E`: the GPU of each block now.
    """
    busy_D = np.zeros(len(slots_D))
    free_D = slots_D.copy()
    owner_E = np.zeros(len(load_E), np.int64)
    for block in np.argsort(-load_E, kind="stable"):
        busy_open_D = np.where(free_D > 0, busy_D, np.inf)
        gpu = int(busy_open_D.argmin())
        if now_E is not None and busy_open_D[now_E[block]] == busy_open_D[gpu]:
            gpu = int(now_E[block])
        owner_E[block] = gpu
        busy_D[gpu] += load_E[block]
        free_D[gpu] -= 1
    if now_E is not None:
        before = np.bincount(now_E, load_E, minlength=len(slots_D)).max()
        if busy_D.max() >= before:
            return now_E
    return owner_E
