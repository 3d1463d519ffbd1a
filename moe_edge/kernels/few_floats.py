"""Rows times experts' weights in bfloat16 or float32, by a few outputs a program.

A program loads whole rows of weights at once and widens them in registers; every row
of x meets them there.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels import rows as rows_kernels
from moe_edge.kernels.few_work import Tile, Work

HELD_BYTES = 256  # of weights by a thread, in its registers
ONE_BODY = False  # weights from the host are loaded from there


def tile_of(width: int, matrices: int, itemsize: int) -> Tile:
    """Outputs and warps for rows of so many weights, of one or two matrices.

    One warp sums without waiting for others, as long as its threads can hold a row: on
    an H200 gate and up of 2048 take 14.4 us of six experts so, 16.5 by four warps.
    """
    row = pl.next_power_of_2(width) * matrices
    most = 32 * HELD_BYTES // itemsize  # of a warp
    warps = min(max(1, row // most), 8)
    return Tile(min(max(1, warps * most // row), 16), warps)


def compute(work: Work, slot, host, row, count, number, from_host: bool) -> None:
    """Some outputs of a block's rows.

    Args:
      slot: of the block's record.
      host: its record in the host's memory, for `from_host`.
      row: its first row.
      count: its rows; None: one.
      number: of the program among those of the block.
      from_host: whether the weights come from there and stay in the slot.
    """
    refs, width = work.refs, work.width
    outputs = refs["out"].shape[1]
    outs_N = number * work.tile.outputs
    outs_N += jnp.arange(work.tile.outputs, dtype=jnp.int32)
    is_out_N = outs_N < outputs
    known_N = jnp.where(is_out_N, outs_N, 0)
    columns_W = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    is_in_W = columns_W < width
    shape_NW = work.tile.outputs, columns_W.size
    known_NW = jnp.broadcast_to(is_out_N[:, None] & is_in_W[None], shape_NW)
    weights = []
    for first in work.firsts:
        at_NW = (first + known_N * width)[:, None] + columns_W[None]
        weights.append(_load(refs, slot, host, at_NW, known_NW, from_host))
    extra = []
    for first in work.biases:
        if first is not None:
            given = first + known_N, is_out_N, from_host
            bias_N = _load(refs, slot, host, *given)
            extra.append(bias_N.astype(jnp.float32))

    def add_row(index, carry):
        pair, source = work.pair(row, index)
        x_ref = refs["x"].at[jnp.full_like(columns_W, source), columns_W]
        x_W = triton.load(x_ref, mask=is_in_W, other=0.0)
        sums = [
            jnp.sum(weight_NW.astype(jnp.float32) * x_W[None], axis=1)
            for weight_NW in weights
        ]
        sums = [a + b for a, b in zip(sums, extra, strict=True)] if extra else sums
        work.finish(pair, sums, outs_N, is_out_N)
        return carry

    if count is None:
        add_row(0, 0)
    else:
        lax.fori_loop(0, count, add_row, 0)


def _load(refs, slot, host, at, mask, from_host: bool):
    """Weights of the record; those from the host stay in its slot."""
    full = jnp.full_like(at, slot)
    if not from_host:
        return triton.load(refs["slots"].at[full, at], mask=mask, other=0.0)
    there = refs["host"].at[jnp.full_like(at, host), at]
    found = triton.load(there, mask=mask, other=0.0)
    if rows_kernels.is_interpreted():
        # Masked lanes write what was there: not over the others.
        at = jnp.where(mask, at, refs["slots"].shape[1])
    triton.store(refs["slots"].at[full, at], found, mask=mask)
    return found
