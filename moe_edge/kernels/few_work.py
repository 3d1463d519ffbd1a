"""What a program of the kernel for few rows knows, however weights are stored."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import triton


class Tile(NamedTuple):
    """What a program of the kernel takes at once."""

    outputs: int  # power of two
    warps: int


class Work(NamedTuple):
    """A product of rows with one matrix of their experts, or with gate and up.

    Attributes:
      refs: the launch's arrays by name.
      firsts: where each matrix begins in a record.
      biases: where its biases begin; None: it has none.
      combine: makes one of two products.
      tile: what a program takes.
      width: weights of a row.
      top_k: pairs of a token.
      kind: of records in blocks, one of `eights.FORMATS`; None: they are floats.
    """

    refs: dict
    firsts: tuple[int, ...]
    biases: tuple[int | None, ...]
    combine: Callable | None
    tile: Tile
    width: int
    top_k: int
    kind: str | None = None

    def pair(self, row, index):
        """The pair of a block's row, and the row of x that it meets."""
        pair, refs = row + index, self.refs
        if "pair_P" in refs:
            pair = refs["pair_P"][pair]
        is_own = refs["x"].shape[0] == refs["out"].shape[0]
        return pair, pair if is_own else pair // self.top_k

    def finish(self, pair, sums: list, outs_N, is_out_N) -> None:
        """Writes outputs of a pair, of one product or of two that become one."""
        out_N = self.combine(*sums) if self.combine is not None else sums[0]
        if "scale" in self.refs:
            out_N *= self.refs["scale"][pair]
        where_N = jnp.full_like(outs_N, pair), outs_N
        triton.store(self.refs["out"].at[where_N], out_N, mask=is_out_N)
