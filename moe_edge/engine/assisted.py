"""CPU assist in the engine: which absent experts the host computes, and its result.

The plan is SMoE's two pointers (algorithm 2) or Fiddler's rule; costs are means of the
last measurements (`offload/assist.py`).
"""

import time

import numpy as np

from moe_edge.core.checks import check_known
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout
from moe_edge.offload.assist import (
    MeasuredCost,
    host_expert,
    host_outputs,
    plan_fiddler,
    plan_two_pointer,
)
from moe_edge.offload.link import Link
from moe_edge.offload.store import HostStore

RULES = ("two_pointer", "fiddler")
MEASUREMENTS = 16  # p of SMoE, section V.A


class Assist:
    """Splits absent experts between link and host, and runs the host's part.

    Args:
      config: the model.
      store: the records in host memory.
      link: what a transfer goes over.
      rule: one of RULES.
    """

    def __init__(self, config: ModelConfig, store: HostStore, link: Link, rule: str):
        check_known("CPU assist", rule, RULES)
        self.rule, self._store, self._moe = rule, store, config.moe
        self._layout = RecordLayout.of(config)
        self.load = MeasuredCost(MEASUREMENTS, self._first_load_s(link))
        self.host = MeasuredCost(MEASUREMENTS, self._first_host_s())
        self.computed = 0  # experts that the host ran
        self._compiled: set[int] = set()  # numbers of tokens; the first call compiles

    def _first_load_s(self, link: Link) -> float:
        """One transfer: of the emulated link, or a copy of a record."""
        if link.emulated:
            return link.seconds(self._store.block_bytes)
        record_R = self._store.record(self._store.moe_layers[0], 0)
        return _timed(lambda: np.array(record_R))

    def _first_host_s(self) -> float:
        """One expert on one token; the first call compiles."""
        record_R = self._store.record(self._store.moe_layers[0], 0)
        x_TD = np.ones((1, self._layout.d_model), np.float32)
        moe = self._moe
        options = {"activation": moe.activation, "swiglu_limit": moe.swiglu_limit}
        return _timed(
            lambda: np.asarray(host_expert(record_R, self._layout, x_TD, **options))
        )

    def split(self, absent) -> tuple[list[int], list[int]]:
        """(to load, for the host), from absent experts, best first."""
        absent = [int(expert) for expert in absent]
        if self.rule == "two_pointer":
            return plan_two_pointer(absent, self.load.mean_s, self.host.mean_s)
        # At the few tokens of decoding an expert costs the same for all of them
        # (SMoE, fig. 8): each counts once.
        ones = np.ones(len(absent), np.int64)
        on_host = plan_fiddler(ones, self.host.mean_s, self.load.mean_s, 0.0)
        load = [e for e, here in zip(absent, on_host, strict=True) if not here]
        return load, [e for e, here in zip(absent, on_host, strict=True) if here]

    def run(self, layer: int, experts: list[int], routed, choice) -> np.ndarray:
        """What the host adds to the layer, float32 `[T, D]`; zeros without experts.

        On the host: so there is one program whether it has computed something or not.
        """
        if not experts:
            return np.zeros(routed.hidden_TD.shape, np.float32)
        started = time.perf_counter()
        y_TD = np.asarray(
            host_outputs(
                [self._store.record(layer, expert) for expert in experts],
                experts,
                self._layout,
                routed.hidden_TD,
                choice.ids_TK,
                choice.read["weights_TK"],
                activation=self._moe.activation,
                swiglu_limit=self._moe.swiglu_limit,
            )
        )
        if len(choice.ids_TK) in self._compiled:
            self.host.add((time.perf_counter() - started) / len(experts))
        self._compiled.add(len(choice.ids_TK))
        self.computed += len(experts)
        return y_TD

    def note(self, transfers) -> None:
        """Measures what the transfers of a layer took."""
        for transfer in transfers:
            if transfer.done and transfer.seconds:
                self.load.add(transfer.seconds)


def _timed(call) -> float:
    """Seconds of the second of two calls."""
    call()
    started = time.perf_counter()
    call()
    return max(time.perf_counter() - started, 1e-9)
