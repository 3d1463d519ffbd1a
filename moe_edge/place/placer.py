"""What every placer gets and gives: the problem, checked once, and the interface."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_positive, check_shape
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.plan import ABSENT, Placement, check_slots


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What requests are like, for placers that predict seconds.

    Attributes:
      top_k: blocks that a token calls.
      prompt_tokens: of a request, one number or one a server.
      output_tokens: likewise; each is a decode step.
      requests_per_s: that arrive at a server; None leaves queues out.
    """

    top_k: int = 8
    prompt_tokens: float | Sequence[float] = 256.0
    output_tokens: float | Sequence[float] = 32.0
    requests_per_s: float | Sequence[float] | None = None

    def __post_init__(self):
        check_count("top_k", self.top_k)
        for name in ("prompt_tokens", "output_tokens", "requests_per_s"):
            given = getattr(self, name)
            for value in () if given is None else np.atleast_1d(given):
                check_positive(name, value)


def check_frequency(frequency_NLE: np.ndarray) -> np.ndarray:
    """float64 [N, L, E] of finite frequencies with calls in every layer.

    Raises:
      ConfigError: another rank or other values, a layer that a server never calls.
    """
    frequency_NLE = np.asarray(frequency_NLE, np.float64)
    check_shape("frequency_NLE", frequency_NLE, (None, None, None))
    bad = ~(np.isfinite(frequency_NLE) & (frequency_NLE >= 0))
    if bad.any():
        place = np.argwhere(bad)[0].tolist()
        value = frequency_NLE[tuple(place)]
        raise ConfigError(
            f"frequency of (server, layer, block) {place} is {value}, expected a "
            "finite number from 0"
        )
    silent = np.argwhere(frequency_NLE.sum(axis=-1) <= 0)
    if len(silent) or not frequency_NLE.size:
        place = silent[0].tolist() if len(silent) else list(frequency_NLE.shape)
        raise ConfigError(
            f"frequencies of (server, layer) {place} sum to 0, expected calls of every "
            "layer; count more tokens"
        )
    return frequency_NLE


@dataclasses.dataclass(frozen=True)
class Problem:
    """A placement to be found: all that placers may look at, checked once.

    Attributes:
      frequency_NLE: float64 [N, L, E], how often server N calls a block.
      slots: of every server int64 [G], blocks that fit on each GPU.
      cost_model: the machines and what calls cost on them; None where nobody knows.
      current: where blocks are now, if anywhere.
      seed: orders what is random.
      traffic: what requests are like.
    Raises:
      ConfigError: statistics, slots or a current placement that make no sense.
      CapacityError: memory for less than one copy of the model.
    """

    frequency_NLE: np.ndarray
    slots: Sequence[np.ndarray]
    cost_model: CostModel | None = None
    current: Placement | None = None
    seed: int = 0
    traffic: Traffic = Traffic()

    def __post_init__(self):
        frequency_NLE = check_frequency(self.frequency_NLE)
        block_bytes = self.cost_model.block.num_bytes if self.cost_model else None
        sizes = len(frequency_NLE), frequency_NLE[0].size, block_bytes
        slots = check_slots(self.slots, *sizes)
        object.__setattr__(self, "frequency_NLE", frequency_NLE)
        object.__setattr__(self, "slots", slots)
        if self.current is not None and (
            self.current.gpu_NLE.shape != frequency_NLE.shape
        ):
            raise ConfigError(
                f"current placement has shape {self.current.gpu_NLE.shape}, statistics "
                f"have {frequency_NLE.shape}"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of one copy of the model."""
        return self.frequency_NLE[0].size

    @property
    def capacity_N(self) -> np.ndarray:
        """int64 [N]: different blocks that a server can hold."""
        total_N = np.array([slots_G.sum() for slots_G in self.slots])
        return np.minimum(total_N, self.num_blocks)

    @property
    def speeds(self) -> list[np.ndarray]:
        """Of every server, relative speed of its GPUs at one block and one token."""
        if self.cost_model is None:
            return [np.ones(len(slots_G)) for slots_G in self.slots]
        return [
            1 / np.array([self.cost_model.compute_s(n, g, 1) for g in range(len(s))])
            for n, s in enumerate(self.slots)
        ]


class Placer:
    """Base of placers: frozen dataclasses whose fields are options.

    A subclass sets `name` and `SOURCE` and implements `choose` (what each server
    holds) or `assign` (which GPU holds it).

    Attributes:
      needs: fields of a `Problem` that must not be None.
      follows_statistics: whether other statistics give another placement.
    """

    name: ClassVar[str]
    SOURCE: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    follows_statistics: ClassVar[bool] = True

    def place(
        self,
        frequency_NLE: np.ndarray,
        slots: Sequence[np.ndarray],
        cost_model: CostModel | None = None,
        **context: Any,
    ) -> Placement:
        """`solve`, given the fields of a `Problem`."""
        return self.solve(Problem(frequency_NLE, slots, cost_model, **context))

    def solve(self, problem: Problem) -> Placement:
        """A placement that covers every block within the memory of every GPU.

        Raises:
          ConfigError: the placer is unfit for the problem.
        """
        if reason := self.unfit(problem):
            raise ConfigError(reason)
        placement = self.assign(problem)
        placement.check(problem.slots)
        return placement

    def unfit(self, problem: Problem) -> str | None:
        """Why the placer cannot solve a problem that has a solution; None if it can."""
        for field in self.needs:
            if getattr(problem, field) is None:
                return (
                    f"placer {self.name} needs a {field.replace('_', ' ')}; name a "
                    "cluster, or use optimal"
                )
        return None

    def assign(self, problem: Problem) -> Placement:
        """The choice of `choose`, packed on the GPUs of each server."""
        on_NLE = self.choose(problem)
        load_NLE = served_load(problem.frequency_NLE, on_NLE)
        return Placement(pack(on_NLE, problem.slots, load_NLE, problem.speeds))

    def choose(self, problem: Problem) -> np.ndarray:
        """bool [N, L, E]: what each server holds."""
        raise NotImplementedError


def pack(
    on_NLE: np.ndarray,
    slots: Sequence[np.ndarray],
    load_NLE: np.ndarray,
    speeds: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """int8 [N, L, E]: the GPU of every block that is on its server, else -1.

    After the choice per server (Prism, constraint 2). A layer is as slow as its slowest
    GPU, so each layer's load is spread over the GPUs of the server, by speed; memory
    binds over all layers together.

    Args:
      on_NLE: bool, what each server holds; at most its slots.
      slots: of every server, blocks that fit on each GPU.
      load_NLE: work that a block makes at a server, any unit.
      speeds: of every server's GPUs, any unit; equal if None.
    """
    gpu_NLE = np.where(on_NLE, 0, ABSENT).astype(np.int8)
    for server, slots_G in enumerate(slots):
        if len(slots_G) > 1:
            speed_G = np.ones(len(slots_G)) if speeds is None else speeds[server]
            gpu_NLE[server] = _pack_server(
                on_NLE[server], slots_G, load_NLE[server], speed_G
            )
    return gpu_NLE


def served_load(frequency_NLE: np.ndarray, on_NLE: np.ndarray) -> np.ndarray:
    """float64 [N, L, E]: calls that a server's copy serves.

    Its own calls, and an equal share of the calls of servers without a copy.
    """
    remote_LE = np.where(on_NLE, 0.0, frequency_NLE).sum(axis=0)
    share_LE = remote_LE / np.maximum(on_NLE.sum(axis=0), 1)
    return np.where(on_NLE, frequency_NLE + share_LE, 0.0)


def quotas(count_L: np.ndarray, slots_G: np.ndarray) -> np.ndarray:
    """int64 [L, G]: blocks of each layer for each GPU, in proportion to free memory.

    Rows sum to count_L, columns stay within slots_G: a layer's share of a GPU is
    proportional to what is left there, so rounding up never passes it.
    """
    left_G = slots_G.astype(np.int64)
    quota_LG = np.zeros((len(count_L), len(slots_G)), np.int64)
    for layer, count in enumerate(count_L):
        quota_LG[layer] = apportion(count, left_G)
        left_G = left_G - quota_LG[layer]
    return quota_LG


def apportion(total: int, weight_X: np.ndarray) -> np.ndarray:
    """int64 [X] that sum to `total`, in proportion to weights.

    What rounding down leaves goes to the largest fractions, the first of equals.
    """
    exact_X = total * weight_X / (weight_X.sum() or 1)
    whole_X = np.floor(exact_X).astype(np.int64)
    fraction_X = np.where(weight_X > 0, exact_X - whole_X, -1.0)
    short = int(total - whole_X.sum())
    whole_X[np.argsort(-fraction_X, kind="stable")[:short]] += 1
    return whole_X


def share_out(total: int, weight_X: np.ndarray, limit_X) -> np.ndarray:
    """int64 [X] that sum to `total`, in proportion to weights within the limits.

    What a full one cannot take is shared among the others, in proportion again; in
    equal parts where only those without weight have room. The limits sum to `total` at
    least.
    """
    share_X = np.zeros(len(weight_X), np.int64)
    while (left := total - int(share_X.sum())) > 0:
        open_X = share_X < limit_X
        open_weight_X = np.where(open_X, weight_X, 0.0)
        if not open_weight_X.any():
            open_weight_X = open_X.astype(np.float64)
        share_X = np.minimum(share_X + apportion(left, open_weight_X), limit_X)
    return share_X


def _pack_server(
    on_LE: np.ndarray, slots_G: np.ndarray, load_LE: np.ndarray, speed_G: np.ndarray
) -> np.ndarray:
    """Longest first to the least busy GPU with quota left; all layers side by side."""
    gpu_LE = np.full(on_LE.shape, ABSENT, np.int8)
    count_L = on_LE.sum(axis=1)
    free_LG = quotas(count_L, slots_G)
    busy_LG = np.zeros(free_LG.shape)
    order_LE = np.argsort(np.where(on_LE, -load_LE, np.inf), axis=1, kind="stable")
    for place in range(int(count_L.max())):
        layers = np.flatnonzero(count_L > place)
        blocks = order_LE[layers, place]
        seconds_XG = busy_LG[layers] + load_LE[layers, blocks, None] / speed_G
        gpus = np.where(free_LG[layers] > 0, seconds_XG, np.inf).argmin(axis=1)
        busy_LG[layers, gpus] += load_LE[layers, blocks] / speed_G[gpus]
        free_LG[layers, gpus] -= 1
        gpu_LE[layers, blocks] = gpus
    return gpu_LE
