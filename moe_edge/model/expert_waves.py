"""Routed experts in waves: a layer whose experts are not all in the slots at once.

Each wave runs the experts that the slots hold and adds to what the waves before it
left. The sums are made in the same order as by `experts.run_experts`, so the result
has the same bits whatever the waves:

  pairs   a wave is a contiguous run of the (token, chosen expert) pairs, token by
          token in order of rank; the carry is the running sum `[T, D]`.
  blocks  a wave is any set of experts; the carry holds the outputs of all pairs
          `[T * K + spare, D]`, summed at the end.

Where some pairs are computed on another machine, the outputs of pairs are wanted
without their sum (`rows`), and summed when all are there (`sum_rows`).

`dense` has no waves of its own and runs as `blocks`.
"""

import functools

import jax
import jax.numpy as jnp

from moe_edge.kernels import blocks as native_blocks
from moe_edge.model.expert_blocks import combine, empty_pairs, fill_pairs, sum_pairs
from moe_edge.model.experts import pair_rows, run_pairs, sum_pair_rows
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout


class ExpertWaves:
    """The steps of a layer in waves; pure functions to be traced into programs.

    Args:
      layout: where the parts stand in a record.
      num_experts: E.
      method: `pairs` or `blocks`.
      activation: one of `config_checks.ACTIVATIONS`.
      swiglu_limit: clip of gate and up, for clamped_swiglu only.
    """

    def __init__(
        self,
        layout: RecordLayout,
        num_experts: int,
        method: str,
        activation: str = "silu",
        swiglu_limit: float | None = None,
    ):
        self.method = "pairs" if method == "pairs" else "blocks"
        self.layout, self._experts = layout, num_experts
        self.act = functools.partial(activate, kind=activation, limit=swiglu_limit)

    def start(self, x_TD: jax.Array, ids_TK: jax.Array) -> jax.Array:
        """The carry before the first wave."""
        if self.method == "pairs":
            return jnp.zeros_like(x_TD)
        return empty_pairs(ids_TK, self.layout, self._experts)

    def run(self, carry, x_TD, ids_TK, weights_TK, slots_SR, slot_of) -> jax.Array:
        """Adds one wave.

        Args:
          carry: of `start` or the wave before.
          x_TD: float32 (tokens, width).
          ids_TK: int32 (tokens, chosen), experts; E means "no expert".
          weights_TK: float32 (tokens, chosen).
          slots_SR: records of the slots.
          slot_of: int32, `pairs`: [T, K] slot of each pair; `blocks`: [E] slot of
            each expert. S leaves the pair or expert to another wave.
        """
        if self.method == "pairs":
            return run_pairs(
                x_TD, slot_of, weights_TK, slots_SR, self.layout, self.act, carry
            )
        return fill_pairs(
            carry,
            x_TD,
            ids_TK,
            slots_SR,
            slot_of,
            self._experts,
            self.layout,
            self.act,
        )

    def finish(self, carry, ids_TK, weights_TK) -> jax.Array:
        """The layer's output `[T, D]` after the last wave."""
        if self.method == "pairs":
            return carry
        return sum_pairs(carry, ids_TK, weights_TK, self._experts)

    def rows(self, x_TD, ids_TK, slots_SR, slot_of) -> jax.Array:
        """Outputs of the pairs whose blocks are here; arguments as of `run`.

        A row has the bits that it has in any other call of as many tokens and choices:
        the pairs of an expert may be computed anywhere, as long as they stay together.

        Returns:
          float32 (T * K, width). `pairs`: token by token in order of rank; `blocks`: in
          order of expert, then of token. Rows of pairs that are not here are arbitrary.
        """
        if self.method == "pairs":
            return pair_rows(x_TD, slot_of, slots_SR, self.layout, self.act)
        out_PD = empty_pairs(ids_TK, self.layout, self._experts)
        where = x_TD, ids_TK, slots_SR, slot_of, self._experts
        return fill_pairs(out_PD, *where, self.layout, self.act)[: ids_TK.size]

    def sum_rows(self, rows_PD, ids_TK, weights_TK) -> jax.Array:
        """The layer's output `[T, D]` from the rows of all pairs."""
        if self.method == "pairs":
            return sum_pair_rows(rows_PD, weights_TK)
        return sum_pairs(rows_PD, ids_TK, weights_TK, self._experts)

    def sum_in_order(self, rows_PD, ids_TK, weights_TK) -> jax.Array:
        """As `sum_rows` of `blocks`, from rows token by token in order of rank.

        Args:
          rows_PD: zeros for pairs of no expert; weights_TK: zero for them.
        """
        pair_P = jnp.arange(ids_TK.size, dtype=jnp.int32)
        if native_blocks.suits(rows_PD):  # each pair the only one of its expert
            given = rows_PD, pair_P.reshape(ids_TK.shape), weights_TK
            return native_blocks.sum_rows(*given, ids_TK.size)
        return combine(rows_PD, pair_P, ids_TK, weights_TK, self._experts)
