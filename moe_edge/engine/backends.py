"""Where an absent expert is computed instead of fetched: backends of the engine.

The layered engine asks its backends in order which absent experts they take, starts
them, and adds their `[T, D]` to the layer's sum. The host is one; another machine is
another. Which ones the host takes an `offload.assist_base.Assist` says; costs are
means of the last measurements (`offload/assist.py`).
"""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import is_ours
from moe_edge.core.plug_in_result import is_whole, wrong_result
from moe_edge.engine.routing_reader import Reading
from moe_edge.model.config import ModelConfig
from moe_edge.offload.assist import HostExperts, MeasuredCost
from moe_edge.offload.assist_base import Assist, AssistCosts
from moe_edge.offload.link import TransferLink, wait_until
from moe_edge.offload.store import HostStore

MEASUREMENTS = 16  # p of SMoE, section V.A


class Backend(Protocol):
    """Computes experts elsewhere than in the device's slots."""

    computed: int  # experts since `reset`
    busy_s: float  # likewise, seconds that they took

    def take(self, reading: Reading, absent: list[int]) -> list[int]:
        """Which absent experts, given best first, it computes in this step."""

    def start(
        self, hidden_TD, reading: Reading, experts: list[int]
    ) -> Callable[[], np.ndarray]:
        """Begins with them; the result waits and gives their weighted sum.

        That is float32 `[T, D]` on the host, zeros if there are none, so that one
        program serves both cases. Nobody writes it afterwards: a program may read it
        where it is.
        """

    def note(self, transfers) -> None:
        """Is told of the layer's transfers, which have ended: what loading costs."""

    def reset(self) -> None:
        """Counts from here on, as after a warm-up; what it measured stays."""


class HostBackend:
    """The host's own cores: an assist splits absent experts between them and the link.

    Attributes:
      computed: experts since `reset`; busy_s: what they took.

    Args:
      expert_s: how long the host takes for an expert, in real time: an emulated host,
        which is slower than this one. None: as long as it takes.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: HostStore,
        link: TransferLink,
        assist: Assist,
        expert_s: float | None = None,
    ):
        self.assist, self._store, self._config = assist, store, config
        self._layers = {
            layer: HostExperts(
                config, [store.record(layer, e) for e in range(store.num_experts)]
            )
            for layer in store.moe_layers
        }
        self._is_foreign = not is_ours(assist)
        self._expert_s = expert_s
        # An expert on the device. On a CPU, where a host can only
        # be emulated, that is what it really takes here.
        self._device_s = 0.0 if expert_s is None else self._first_host_s()
        self.load = MeasuredCost(MEASUREMENTS, self._first_load_s(link))
        self.host = MeasuredCost(MEASUREMENTS, expert_s or self._first_host_s())
        self.computed, self.busy_s = 0, 0.0
        self.links = 1  # over which experts travel at once
        self._compiled: set[int] = set()  # numbers of tokens

    def _first_load_s(self, link: TransferLink) -> float:
        """One transfer: of the emulated link, or a copy of a record."""
        if link.emulated:
            return link.seconds(self._store.block_bytes)
        record_R = self._store.record(self._store.moe_layers[0], 0)
        return _timed(lambda: np.array(record_R))

    def _first_host_s(self) -> float:
        """One expert on one token; the first call compiles."""
        experts = self._layers[self._store.moe_layers[0]]
        x_TD = np.ones((1, self._config.d_model), np.float32)
        token = x_TD, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
        return _timed(lambda: experts.outputs([0], *token))

    @property
    def costs(self) -> AssistCosts:
        """What the assist sees now."""
        load_s = self.load.mean_s / self.links
        return AssistCosts(load_s, self.host.mean_s, self._device_s)

    def take(self, reading: Reading, absent: list[int]) -> list[int]:
        taken = self.assist.take(absent, reading.ids_TK, self.costs)
        if self._is_foreign:
            taken = self._check_ids(taken)
        taken = list(taken)
        if not {*taken} <= {*absent} or len({*taken}) < len(taken):
            raise ConfigError(
                f"assist {self.assist.name} took experts {taken} of layer "
                f"{reading.layer}, expected each at most once, of the absent {absent}"
            )
        return taken

    def _check_ids(self, taken) -> list[int]:
        """What an assist of another author gave, as a list of ids."""
        try:
            ids = [*taken]
        except TypeError:
            ids = [None]
        if not all(map(is_whole, ids)):
            raise wrong_result(
                f"assist {self.assist.name}", "take", taken, "a list of expert ids"
            )
        return [int(expert) for expert in ids]

    def start(self, hidden_TD, reading: Reading, experts: list[int]):
        begun_s = time.perf_counter()
        return lambda: self._run(hidden_TD, reading, experts, begun_s)

    def _run(
        self, hidden_TD, reading: Reading, experts: list[int], begun_s: float
    ) -> np.ndarray:
        tokens = len(reading.ids_TK)
        if tokens not in self._compiled:  # also where none is asked for: a warm-up
            self._compiled.add(tokens)
            self._outputs(hidden_TD, reading, [0, 0])  # with the sum of two
        if not experts:
            return np.zeros(hidden_TD.shape, np.float32)
        started_s = time.perf_counter()
        y_TD = self._outputs(hidden_TD, reading, experts)
        took_s = time.perf_counter() - started_s
        if self._expert_s is not None:
            # Since it was asked, whatever was done meanwhile.
            took_s = max(took_s, self._expert_s * len(experts))
            wait_until(begun_s + took_s)
        self.host.add(took_s / len(experts))
        self.computed += len(experts)
        self.busy_s += took_s
        return y_TD

    def _outputs(self, hidden_TD, reading: Reading, experts: list[int]) -> np.ndarray:
        routing = reading.ids_TK, reading.host_weights_TK
        return self._layers[reading.layer].outputs(experts, hidden_TD, *routing)

    def note(self, transfers) -> None:
        for transfer in transfers:
            if transfer.done and transfer.seconds:
                self.load.add(transfer.seconds)

    def reset(self) -> None:
        self.computed, self.busy_s = 0, 0.0


def _timed(call) -> float:
    """Seconds of the second of two calls."""
    call()
    started = time.perf_counter()
    call()
    return max(time.perf_counter() - started, 1e-9)
