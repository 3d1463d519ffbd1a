"""How the layered engine calls the programs of a layer: with arrays, or with words.

Arrays suit a CPU, where a NumPy argument costs 2 us. Words (`layer_words`) suit a GPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.layer_words import PinnedWords, Reads
from moe_edge.engine.packed_programs import PackedPrograms
from moe_edge.engine.routing_reader import Reading
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights
from moe_edge.model.router import Routing
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.slots import Slots
from moe_edge.predict.predictor_run import PredictorRun


class Arrays:
    """Small arrays, of NumPy where the host made them."""

    def put(self, tree: Any) -> Any:
        """See `Engine.put`."""
        return jax.device_put(tree)

    def weights(self, weights: Weights) -> Weights:
        """Those that programs take; never a copy."""
        return weights

    def windows(self, windows: list[jax.Array]) -> list[jax.Array]:
        """The layers' windows, likewise."""
        return windows

    def steps(self, programs: LayerPrograms, reads: Reads):
        """`attend`, `advance`, `experts` and `peek` that take what `chosen` gives.

        From here on the exchange calls the programs of waves.
        """
        self._programs = programs
        return programs

    def chosen(
        self, layer: int, routed: Routed, slot_TK, reading: Reading, slots_SR, *other
    ) -> tuple:
        """What programs take of a layer whose experts stand in slots.

        Args:
          layer: whose words they are; those of a peek, layer + L.
          slot_TK: of every chosen expert, of NumPy.
          other: what backends add (None: nothing), or nothing.
        """
        return routed, slot_TK, reading.weights_TK, slots_SR, *other

    def in_arrays(self, routed: Routed, reading: Reading) -> tuple[Routed, Reading]:
        """As waves take them."""
        return routed, reading

    def hidden_of(self, routed: Routed, reading: Reading):
        """hidden_TD, for backends."""
        return routed.hidden_TD

    # A layer in waves: start, wave, wave, ..., finish; of arrays (`in_arrays`).

    def start(self, routed: Routed, reading: Reading):
        """What waves carry, before the first."""
        return self._programs.start(routed)

    def wave(self, carry, routed: Routed, reading: Reading, slots_SR, slot_of) -> tuple:
        """(carry, arrays that are ready when the slots may be written again)."""
        given = routed, reading.weights_TK, slots_SR, slot_of
        return self._programs.wave(carry, *given)

    def finish(self, routed: Routed, reading: Reading, carry):
        """The residual stream after the experts."""
        return self._programs.finish(routed, carry, reading.weights_TK)


class Placed(Arrays):
    """Everything has a stated device.

    So have arrays in pinned memory or of another device, and what is computed from
    them: without one for the others, a program's second call would compile again.
    """

    def __init__(self, device: jax.Device):
        self.device = device

    def put(self, tree):
        return jax.device_put(tree, self.device)

    def weights(self, weights):
        top, layers = self.put((weights.top, weights.layers))
        return dataclasses.replace(weights, top=top, layers=layers)

    def windows(self, windows):
        return self.put(windows)


class Words(Placed):
    """One array of words each way, in pinned memory."""

    def __init__(self, device: jax.Device):
        super().__init__(device)
        self._words = PinnedWords(device)

    def steps(self, programs, reads):
        return PackedPrograms.of(super().steps(programs, reads), reads)

    def chosen(self, layer, routed, slot_TK, reading, slots_SR, *other):
        # The programs that read this layer's words in the step before have run.
        told = [slot_TK, reading.weights_TK, *other]
        told = [each for each in told if isinstance(each, np.ndarray)]
        return routed._replace(words=None), self._words.put(layer, told), slots_SR

    def in_arrays(self, routed, reading):
        ids_TK, weights_TK = self.put((reading.ids_TK, reading.weights_TK))
        routed = routed._replace(routing=Routing(ids_TK, weights_TK, None), words=None)
        return routed, reading._replace(weights_TK=weights_TK)

    def hidden_of(self, routed, reading):
        return reading.hidden_TD


class LayerCalls:
    """Calls the programs of one model's layers, whose experts stand in slots.

    Args:
      weights, windows: as the exchange has placed them.
      steps: of `exchange.steps`.
      predictions: says what gates to run on a layer's state.
      note_dispatch: is told before a layer's attention is dispatched.
    """

    def __init__(
        self,
        weights: Weights,
        windows: list[jax.Array],
        exchange: Arrays,
        steps: LayerPrograms | PackedPrograms,
        slots: Slots | HomeSlots,
        predictions: PredictorRun,
        note_dispatch: Callable[[], None],
    ):
        config = weights.config
        self._windows, self._layers = windows, weights.layers
        self._exchange, self._steps, self._slots = exchange, steps, slots
        self._kinds = tuple(map(config.like, range(config.num_layers)))
        self._count, self._moe_layers = config.num_layers, {*config.moe_layers}
        self._predicts = not predictions.is_idle
        self._predictor, self._note_dispatch = predictions.predictor, note_dispatch

    def _arguments(self, session: Session, layer: int, chunk) -> tuple:
        asks = self._predicts and chunk.valid_BS.shape[1] == 1
        gates = self._predictor.gates_after(layer) if asks else ()
        given = self._layers[layer], gates, chunk, self._windows[layer]
        return *given, session.caches[layer]

    def attend(self, session: Session, layer: int, x, chunk):
        """A dense layer, or a MoE layer up to its routing."""
        arguments = self._arguments(session, layer, chunk)
        self._note_dispatch()
        given = self._kinds[layer], x, *arguments
        state, session.caches[layer] = self._steps.attend(*given)
        return state

    def advance(self, session: Session, routed: Routed, slot_TK, reading, chunk, other):
        """A layer's experts and the next layer's attention; `other`: what backends add.

        Args: as of `Arrays.chosen`.
        """
        following = reading.layer + 1
        given = reading.layer, routed, slot_TK, reading, self._slots.array, other
        chosen = self._exchange.chosen(*given)
        if following == self._count:
            return self._steps.experts(*chosen)
        arguments = self._arguments(session, following, chunk)
        self._note_dispatch()
        given = self._kinds[following], chosen, *arguments
        state, session.caches[following] = self._steps.advance(*given)
        return state

    def peek(self, session: Session, routed: Routed, slot_TK, reading, chunk):
        """What the next layer would choose after the experts in these slots; None: it
        has no experts."""
        following = reading.layer + 1
        if following not in self._moe_layers:
            return None
        given = routed, slot_TK, reading, self._slots.array
        chosen = self._exchange.chosen(reading.layer + self._count, *given)
        arguments = self._arguments(session, following, chunk)
        given = self._kinds[following], chosen, *arguments
        return self._steps.peek(*given, top_a=self._predictor.top_a)
