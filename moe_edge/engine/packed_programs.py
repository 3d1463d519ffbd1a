"""`LayerPrograms` that exchange words with the host in place of small arrays.

See `layer_words`. The layer between is the same, operation by operation, so that every
bit is.
"""

import math

import jax
import jax.numpy as jnp

from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.layer_words import Reads, pack, split
from moe_edge.engine.programs import jit_step
from moe_edge.model.branches import seam
from moe_edge.model.router import Routing

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class PackedPrograms:
    """`attend`, `advance`, `experts` and `peek` of `programs`, which keep the others.

    Only for layers whose pairs stand in slots all at once; waves take arrays.

    Args:
      reads: what the host reads of a layer.
    """

    def __init__(self, programs: LayerPrograms, reads: Reads):
        self._programs, self._reads = programs, reads
        options = {"static_argnums": 0, "donate_argnames": "cache"}
        self.attend = jit_step(self._attend, **options)
        self.advance = jit_step(self._advance, **options)
        self.experts = jit_step(self._experts)
        self.peek = jit_step(self._peek, static_argnums=0, static_argnames="top_a")

    @classmethod
    def of(cls, programs: LayerPrograms, reads: Reads) -> "PackedPrograms":
        """Those that `programs` share, made once."""
        if reads not in programs.variants:
            programs.variants[reads] = cls(programs, reads)
        return programs.variants[reads]

    def _attend(self, kind, x_BSD, layer, gates, chunk, window, cache):
        """As `LayerPrograms.attend`; what is read of a MoE layer leaves as words."""
        given = x_BSD, layer, gates, chunk, window, cache
        state, cache = self._programs.attend_step(kind, *given)
        is_routed = isinstance(state, Routed)
        return self._in_words(state) if is_routed else state, cache

    def _in_words(self, routed: Routed) -> Routed:
        """The words are the ids and what else is read, in pinned memory."""
        routing, reads = routed.routing, self._reads
        parts = [routing.ids_TK]
        parts += [routing.weights_TK] if reads.weights else []
        parts += [routing.scores_TE] if reads.scores else []
        parts += [routed.hidden_TD] if reads.hidden else []
        parts += [] if routed.wanted_NE is None else [routed.wanted_NE]
        words = jax.device_put(pack(seam(parts)), _HOST)
        left = None if reads.weights else Routing(None, routing.weights_TK, None)
        return routed._replace(routing=left, wanted_NE=None, words=words)

    def _experts(self, routed: Routed, words, slots_SR):
        """As `LayerPrograms.experts`.

        Args:
          words: in pinned memory: slot_TK, weights_TK unless they stayed here, and
            other_TD where something was computed elsewhere.
        """
        words = jax.device_put(words, _DEVICE)
        T, D = routed.hidden_TD.shape
        shapes = [((T, self._programs.config.moe.top_k), jnp.int32)]
        if routed.routing is None:
            shapes.append((shapes[0][0], jnp.float32))
        if words.size > sum(math.prod(shape) for shape, _ in shapes):
            shapes.append(((T, D), jnp.float32))
        slot_TK, *more = seam(split(words, shapes))
        weights_TK = more.pop(0) if routed.routing is None else routed.routing[1]
        # Pairs know their experts by slots; ids stand here for a shape.
        routed = routed._replace(routing=Routing(slot_TK, weights_TK, None))
        given = routed, slot_TK, weights_TK, slots_SR, *more
        return self._programs.experts_step(*given)

    def _advance(self, kind, chosen, layer, gates, chunk, window, cache):
        """`experts` of a layer (its arguments: `chosen`) and `attend` of the next."""
        x_BSD = seam(self._experts(*chosen))
        return self._attend(kind, x_BSD, layer, gates, chunk, window, cache)

    def _peek(self, kind, chosen, layer, gates, chunk, window, cache, top_a):
        """As `LayerPrograms.peek`; its scores are in the host's memory."""
        x_BSD = self._experts(*chosen)
        following = layer, chunk, window, cache, top_a
        return jax.device_put(self._programs.peek_step(kind, x_BSD, *following), _HOST)
