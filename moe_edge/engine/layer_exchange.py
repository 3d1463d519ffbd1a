"""How the layered engine hands programs what they take of a layer: arrays, or words.

Arrays suit a CPU, where a NumPy argument costs 2 us. Words (`layer_words`) suit a GPU.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.layer_words import PinnedWords, Reads
from moe_edge.engine.packed_programs import PackedPrograms
from moe_edge.engine.routing_reader import Reading
from moe_edge.engine.weights import Weights
from moe_edge.model.router import Routing


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
