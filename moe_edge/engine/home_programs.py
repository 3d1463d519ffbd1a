"""The jitted programs of layers whose experts have homes on several devices.

A home computes the outputs of the (token, expert) pairs whose experts live there, a row
each. The first device brings the rows of all homes together, as they were computed, and
only then weights and sums them, in the order of one device: same bits.

Of a few pairs every home sends all rows, with minus zeros in those of others, which a
sum leaves as they are, bit by bit. Of many (a layer in waves) it sends its own, in
pieces of one size.
"""

import jax.numpy as jnp

from moe_edge.engine.layer_programs import LayerPrograms, Routed
from moe_edge.engine.programs import jit_step
from moe_edge.model import expert_groups
from moe_edge.model.branches import add_experts, seam


class HomePrograms:
    """`attend`, `advance`, `experts` and `peek` of `programs`, and those of a home.

    Args:
      weighs: whether rows of pairs are weighted where they are computed, as the kernel
        of a GPU does.
    """

    def __init__(self, programs: LayerPrograms, weighs: bool):
        self._programs, self._weighs = programs, weighs
        # On a home's device.
        self.rows = jit_step(self._rows)
        # Not a number of its arguments is read: they say where its result is to be.
        self.start = jit_step(self._start, keep_unused=True)
        self.wave = jit_step(self._wave, donate_argnames="carry")
        self.take = jit_step(_take)
        # On the first one.
        self.merge = jit_step(_merge)
        self.put_first = jit_step(_put_first, static_argnames="count")
        self.put = jit_step(_put, donate_argnames="rows_PD")
        self.experts = jit_step(self._experts)
        self.finish = jit_step(self._finish)
        self.advance = jit_step(
            self._advance, static_argnums=0, donate_argnames="cache"
        )
        self.peek = jit_step(self._peek, static_argnums=0, static_argnames="top_a")

    @classmethod
    def of(cls, programs: LayerPrograms, weighs: bool) -> "HomePrograms":
        """Those that `programs` share, made once."""
        if cls not in programs.variants:
            programs.variants[cls] = cls(programs, weighs)
        return programs.variants[cls]

    @property
    def attend(self):
        return self._programs.attend

    @property
    def num_experts(self) -> int:
        return self._programs.config.moe.num_experts

    def is_pairs(self, tokens: int) -> bool:
        """As `LayerPrograms.is_pairs`."""
        return self._programs.is_pairs(tokens)

    def _waves_of(self, x_TD, slots_SR):
        return self._programs.waves_of(x_TD.shape[0], slots_SR.dtype)

    def _rows(self, x_TD, slot_TK, slots_SR, weights_TK):
        """Rows `[P, D]` of the pairs whose experts are in a home's slots.

        Args:
          slot_TK: as the home counts; S or more is elsewhere.
          weights_TK: where rows are weighted at home, else None.
        """
        waves = self._waves_of(x_TD, slots_SR)
        if weights_TK is None:
            rows_PD = waves.rows(x_TD, slot_TK, slots_SR, slot_TK)
        else:
            given = x_TD, slot_TK, slots_SR, waves.layout, waves.act
            rows_PD = expert_groups.pair_rows(*given, weights_TK.reshape(-1))
        is_here_TK = slot_TK < slots_SR.shape[0]
        return jnp.where(is_here_TK.reshape(-1, 1), rows_PD, -0.0)

    # A home's rows in waves; of `blocks` in order of expert, then of token.

    def _start(self, x_TD, ids_TK, slots_SR):
        waves = self._waves_of(x_TD, slots_SR)
        if waves.method == "blocks":
            return waves.start(x_TD, ids_TK)
        return jnp.zeros((ids_TK.size, x_TD.shape[1]), jnp.float32)

    def _wave(self, carry, x_TD, ids_TK, slots_SR, slot_E, weights_TK):
        """(carry, scalar that is ready when the slots may be written again)."""
        waves = self._waves_of(x_TD, slots_SR)
        if waves.method == "blocks":
            # Weights come with the sum.
            carry = waves.run(carry, x_TD, ids_TK, None, slots_SR, slot_E)
            return carry, carry[0, 0]
        slot_TK = jnp.append(slot_E, jnp.int32(slots_SR.shape[0]))[ids_TK]
        rows_PD = self._rows(x_TD, slot_TK, slots_SR, weights_TK)
        is_here_TK = slot_TK < slots_SR.shape[0]
        carry = jnp.where(is_here_TK.reshape(-1, 1), rows_PD, carry)
        return carry, carry[0, 0]

    # On the first device.

    def _experts(self, routed: Routed, rows, ids_TK, weights_TK, other_TD=None):
        """As `LayerPrograms.experts`, from rows of `pairs`, an array a home."""
        rows_PD = _merge(rows)
        return self._finish(routed, rows_PD, ids_TK, weights_TK, other_TD)

    def _finish(self, routed: Routed, rows_PD, ids_TK, weights_TK, other_TD=None):
        """The residual stream after the experts, whose rows are all here."""
        config, (T, _) = self._programs.config, routed.hidden_TD.shape
        waves = self._programs.waves_of(T, self._programs.dtype)
        is_here_TK = ids_TK < config.moe.num_experts
        if waves.method == "pairs" and self._weighs:
            start_TD = jnp.zeros_like(routed.hidden_TD)
            y_TD = expert_groups.add_ranks(start_TD, rows_PD, is_here_TK)
        else:
            # A choice, not a product: those of padding tokens may be no numbers.
            weights_TK = jnp.where(is_here_TK, weights_TK, 0.0)
            y_TD = waves.sum_rows(rows_PD, ids_TK, weights_TK)
        y_TD = seam(y_TD)
        if other_TD is not None:
            y_TD = y_TD + other_TD
        return add_experts(config, routed.x_BSD, y_TD, routed.shared)

    def _advance(self, kind, chosen, layer, gates, chunk, window, cache):
        """`experts` of a layer (its arguments: `chosen`) and `attend` of the next."""
        x_BSD = seam(self._experts(*chosen))
        attend = self._programs.attend_step
        return attend(kind, x_BSD, layer, gates, chunk, window, cache)

    def _peek(self, kind, chosen, layer, gates, chunk, window, cache, top_a):
        """As `LayerPrograms.peek`."""
        x_BSD = self._experts(*chosen)
        following = layer, chunk, window, cache, top_a
        return self._programs.peek_step(kind, x_BSD, *following)


def _take(carry, row_C):
    """A piece `[C, D]` of a home's rows."""
    return carry[row_C]


def _put_first(piece_CD, row_C, count: int):
    """Rows `[count, D]` with a piece in its places; those at `count` and above go."""
    rows_PD = jnp.zeros((count, piece_CD.shape[1]), piece_CD.dtype)
    return _put(rows_PD, piece_CD, row_C)


def _put(rows_PD, piece_CD, row_C):
    return rows_PD.at[row_C].set(piece_CD, mode="drop", unique_indices=True)


def _merge(rows):
    """Rows of all pairs, from an array a home."""
    rows_PD, *others = rows
    for other_PD in others:
        rows_PD = rows_PD + other_PD
    return rows_PD
