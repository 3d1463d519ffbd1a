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

    def steps(self, programs: LayerPrograms, reads: Reads):
        """`attend`, `advance`, `experts` and `peek` that take what `chosen` gives."""
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


class Words(Arrays):
    """One array of words each way, in pinned memory.

    Arrays there have a stated place, and so has what is computed from them: without one
    for the others, a program's second call would compile again.
    """

    def __init__(self, device: jax.Device):
        self._words, self._device = PinnedWords(device), device

    def put(self, tree):
        return jax.device_put(tree, self._device)

    def weights(self, weights):
        top, layers = self.put((weights.top, weights.layers))
        return dataclasses.replace(weights, top=top, layers=layers)

    def steps(self, programs, reads):
        return PackedPrograms.of(programs, reads)

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
