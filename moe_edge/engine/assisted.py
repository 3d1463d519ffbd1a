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
    host_outputs,
    plan_fiddler,
    plan_two_pointer,
)
from moe_edge.offload.store import HostStore

RULES = ("two_pointer", "fiddler")
MEASUREMENTS = 16  # p of SMoE, section V.A
START_S = 1e-3  # a cost before its first measurement


class Assist:
    """Splits absent experts between link and host, and runs the host's part.

    Args:
      config: the model.
      store: the records in host memory.
      rule: one of RULES.
    """

    def __init__(self, config: ModelConfig, store: HostStore, rule: str):
        check_known("CPU assist", rule, RULES)
        self.rule, self._store, self._moe = rule, store, config.moe
        self._layout = RecordLayout.of(config)
        self.load = MeasuredCost(MEASUREMENTS, START_S)
        self.host = MeasuredCost(MEASUREMENTS, START_S)
        self.computed = 0  # experts that the host ran
        self._compiled: set[int] = set()  # numbers of tokens; the first call compiles

    def split(self, absent) -> tuple[list[int], list[int]]:
        """(to load, for the host), from absent experts, best first."""
        absent = [int(expert) for expert in absent]
        if self.rule == "two_pointer":
            return plan_two_pointer(absent, self.load.mean_s, self.host.mean_s)
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
                np.asarray(choice.weights_TK),
                activation=self._moe.activation,
                swiglu_limit=self._moe.swiglu_limit,
            )
        )
        if len(choice.ids_TK) in self._compiled:
            self.host.add((time.perf_counter() - started) / len(experts))
        self._compiled.add(len(choice.ids_TK))
        self.computed += len(experts)
        return y_TD

    def note(self, tickets) -> None:
        """Measures what the transfers of a layer took."""
        for ticket in tickets:
            if ticket.done and ticket.seconds:
                self.load.add(ticket.seconds)
