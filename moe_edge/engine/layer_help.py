"""What a decode layer does while its experts travel: others compute, or look ahead.

Backends compute absent experts in the meantime, and a predictor of partial states (that
of SMoE) looks at what the experts that are here already give.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from moe_edge.engine.backends import Backend
from moe_edge.engine.routing_reader import Reading
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.layer_visit import LayerVisit

# Of slots [T, K]: what the next layer would choose [E]; None: it has no experts.
Peek = Callable[[np.ndarray], jax.Array | None]


class LayerHelp:
    """Brings layers' experts with the help of backends and of peeks.

    Attributes:
      is_idle: whether there is neither.

    Args:
      peeks: whether the predictor takes partial states.
    """

    def __init__(self, layer_step: LayerStep, backends: Sequence[Backend], peeks: bool):
        self._layer_step, self._backends, self._peeks = layer_step, backends, peeks
        self._residency = layer_step.residency
        self._predictions = layer_step.predictor_run
        self.is_idle = not backends and not peeks
        # By number of tokens. Programs are compiled by whoever runs first, so backends
        # and peeks run once before anything may pass them by.
        self.zeros: dict[int, np.ndarray] = {}  # what backends add where all is here
        self._peeked: set[int] = set()

    def may_pass(self, tokens: int) -> bool:
        """Whether a layer whose experts are all here needs nobody's help."""
        helped = not self._backends or tokens in self.zeros
        return helped and (not self._peeks or tokens in self._peeked)

    def bring(
        self, reading: Reading, visit: LayerVisit, hidden_TD: Any, peek: Peek
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Brings a layer's experts, or lets backends compute absent ones.

        Returns:
          slots of the chosen experts, and what backends add: float32 [T, D] or None.
        """
        absent, elsewhere, parts = visit.misses, [], []
        if reading.is_decode:
            for backend in self._backends:
                taken = backend.take(reading, absent)
                absent = [expert for expert in absent if expert not in taken]
                elsewhere += taken
                parts.append(backend.start(hidden_TD, reading, taken))
        visit.missed += elsewhere  # nobody fetches them
        outputs = []

        def meanwhile():
            # Where nothing had to be brought the next layer's own router sees the
            # state as soon.
            is_new = len(reading.ids_TK) not in self._peeked
            if self._peeks and reading.is_decode and (visit.travels or is_new):
                self._look(reading, visit, peek)
            outputs.extend(finish() for finish in parts)

        fetched = self._layer_step.bring(visit, absent, meanwhile)
        for backend in self._backends:
            backend.note(fetched)
        # One may be on its way for the next token already: not for this one.
        where = reading.layer, reading.ids_TK
        slot_TK = self._residency.slots(*where, leave_out=elsewhere)
        if not outputs:
            return slot_TK, None
        # NumPy's always, the zeros too: an array of the device would compile a program
        # of its own. On a CPU putting one there takes 60 us, a call with it 2.
        other_TD = functools.reduce(np.add, outputs)
        if not elsewhere:
            other_TD = self.zeros.setdefault(len(other_TD), other_TD)
        return slot_TK, other_TD

    def _look(self, reading: Reading, visit: LayerVisit, peek: Peek) -> None:
        """Prefetches what the next layer would choose on the state that is ready."""
        layer, ids_TK = reading.layer, reading.ids_TK
        slot_TK = self._residency.slots(layer, ids_TK, arrived_only=True)
        wanted_E = peek(slot_TK)
        if wanted_E is not None:
            self._peeked.add(len(ids_TK))
            self._predictions.store(layer, np.asarray(wanted_E)[None])
            self._layer_step.prefetch(visit)
