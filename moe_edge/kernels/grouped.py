"""Products of sorted rows with experts' weights on a GPU: one Triton kernel (Pallas).

Rows that meet the same expert stand together and are cut into blocks of up to
`block_rows`; a program of the kernel multiplies one block with some outputs of one
expert's matrix, read where it stands in the records. So each weight is read about once,
whatever was chosen, and nothing depends on the choice but numbers: no loop of XLA's
runs over experts, which on a GPU would wait for the host in every round.

Weights in bfloat16 meet a float32 row in parts of 8 bits, each of them bfloat16
(`split`), summed in float32. One part is the row rounded to bfloat16, an error of 2^-9,
as `transformers` and vLLM have it; two leave 2^-17, three are the row itself. Each part
is a product of its own: with three a step takes 1.7 times as long as with one at batch
1, and 2.1 times at batch 8; a prompt of 512 with two 1.3 times (H200,
docs/performance.md). One is the default, `MOE_EDGE_PARTS` asks for another number.

The bits of a row depend neither on the other rows nor on its place. Biases, weights of
pairs and parts are the kernel's work for that reason, too: XLA rounds a product and a
sum at once wherever it sees both, and what it sees differs from program to program.
Finding rows and what stands between two products are, because a kernel of their own
takes longer to launch than to run.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.core.float32 import PRECISION
from moe_edge.kernels import rows, switches
from moe_edge.kernels.grouped_weights import Weights, operands


class Tiles(NamedTuple):
    """Sizes of the kernel's blocks, powers of two from 16, and how it is compiled."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# A default changes only after it was timed on a GPU: see docs/gpu_todo.md.
FEW = Tiles(16, 32, 128, 4, 4)  # reading weights takes the time
MANY = Tiles(64, 128, 64, 4, 3)  # multiplying does
MANY_WIDE = Tiles(64, 64, 32, 4, 3)  # the same for float32, which takes more room
VARIABLE, PARTS = "MOE_EDGE_PARTS", ("1", "2", "3")


class Blocks(NamedTuple):
    """What each block of rows meets, int32 `[B]` each."""

    record_B: jax.Array
    row_B: jax.Array  # its first row
    count_B: jax.Array  # its rows; 0 leaves it out


def num_parts() -> int:
    """Parts of a row that meets bfloat16: what MOE_EDGE_PARTS says, or 1.

    Raises:
      ConfigError: another number than 1, 2 or 3.
    """
    return int(switches.chosen(VARIABLE, PARTS, "1"))


def describe() -> str:
    """How rows meet bfloat16 weights on a GPU, for people."""
    return f"rows in bfloat16 parts: {num_parts()}"


def suits(weights: jax.Array) -> bool:
    """Whether rows are to meet these weights by this kernel here."""
    return (
        rows.are_wanted()
        and isinstance(weights, jax.Array)
        and weights.dtype in (jnp.bfloat16, jnp.float32)
    )


def places(ids_P: jax.Array) -> jax.Array:
    """Where each pair stands among all in order of expert, int32 `[P]`.

    By comparing all with all: on a GPU one kernel, where sorting is several.
    """
    earlier_PP = jnp.tri(ids_P.size, k=-1, dtype=bool)
    before_PP = ids_P[None] < ids_P[:, None]
    before_PP |= (ids_P[None] == ids_P[:, None]) & earlier_PP
    return jnp.sum(before_PP, axis=1, dtype=jnp.int32)


def plan(ids_P: jax.Array, record_E: jax.Array | None, experts: int, block_rows: int):
    """Cuts the rows of sorted pairs into blocks of one expert each.

    Args:
      ids_P: int32, expert of each pair; `experts` and above means none.
      record_E: int32, the record of each expert, -1 for experts that are not here.
        None: expert e is record e.
    Returns:
      Blocks; those of experts that are not here have no rows.
    """
    P = ids_P.size
    numbers_E = jnp.arange(experts, dtype=jnp.int32)
    counts_E = jnp.sum(ids_P[:, None] == numbers_E[None], axis=0, dtype=jnp.int32)
    ends_E = jnp.cumsum(counts_E)
    blocks_E = (counts_E + block_rows - 1) // block_rows
    last_block_E = jnp.cumsum(blocks_E)
    blocks = jnp.arange(min(P, experts) + P // block_rows, dtype=jnp.int32)
    done_BE = last_block_E[None] <= blocks[:, None]
    expert_B = jnp.sum(done_BE, axis=1, dtype=jnp.int32)
    real_B = expert_B < experts
    expert_B = jnp.minimum(expert_B, experts - 1)
    inside_B = blocks - (last_block_E - blocks_E)[expert_B]
    row_B = (ends_E - counts_E)[expert_B] + inside_B * block_rows
    count_B = jnp.minimum(ends_E[expert_B] - row_B, block_rows)
    record_B = expert_B if record_E is None else record_E[expert_B]
    real_B &= record_B >= 0
    zero = jnp.int32(0)
    return Blocks(
        jnp.where(real_B, record_B, zero),
        jnp.where(real_B, row_B, zero),
        jnp.where(real_B, count_B, zero),
    )


def split(x: jax.Array, dtype, parts: int) -> list[jax.Array]:
    """float32 values as a sum of some of the weights' dtype, the largest first."""
    if dtype == jnp.float32:
        return [x]
    found, exponent = [], jnp.uint32(0x7F800000)
    for _ in range(parts):
        # The upper half of a float32, rounded, is a bfloat16. Not by `astype` and back,
        # which XLA takes for x itself.
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        rounded = bits + jnp.uint32(0x8000)
        rounded = jnp.where(rounded & exponent == exponent, bits, rounded)  # too large
        high = lax.bitcast_convert_type(rounded & jnp.uint32(0xFFFF0000), jnp.float32)
        # NaN and infinity have one part; rounding would make numbers of them.
        is_finite = bits & exponent != exponent
        found.append(jnp.where(is_finite, high, x).astype(dtype))
        x = jnp.where(is_finite, x - high, 0.0)
    return found


def product(
    x_TI: jax.Array,
    records_SR: jax.Array,
    first: int,
    blocks: Blocks,
    tiles: Tiles,
    outputs: tuple[int, int] | jax.Array,
    *,
    kind: str | None = None,
    source_P: jax.Array | None = None,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    bias: int | None = None,
    scale_P: jax.Array | None = None,
) -> jax.Array:
    """Sorted rows times their experts' matrices, `(x @ weight.T + bias) * scale`.

    Args:
      x_TI: float32; with `combine` `[T, 2 * I]`, both halves side by side.
      records_SR: float32, bfloat16 or in blocks.
      first: where the matrix `[O, I]` begins in a record.
      blocks: of rows, see `plan`.
      tiles: `rows` as given to `plan`.
      outputs: (P, O), then rows in no block are arbitrary; or a float32 array `[P, O]`
        that becomes the result, then they stay as they are.
      kind: of records in blocks, one of `eights.FORMATS`; None: they are floats.
      source_P: int32, the row of x that each sorted row is; None: the only one, or all
        in this order.
      combine: makes a row `[I]` of its two halves, element by element.
      bias: where the bias `[O]` begins in a record; None: there is none.
      scale_P: float32, a factor of each row; None: 1.
    Returns:
      float32 `[P, O]`.
    """
    # One array, which XLA makes in one kernel.
    given = {"blocks": jnp.stack(blocks), "x": x_TI}
    given |= operands(records_SR, kind, bias is not None)
    given |= {"source": source_P, "scale": scale_P}
    given = {name: array for name, array in given.items() if array is not None}
    aliases, shape = {}, outputs
    if isinstance(outputs, jax.Array):
        aliases, shape = {len(given): 0}, outputs.shape
        given["before"] = outputs

    def kernel(*refs):
        refs = dict(zip((*given, "out"), refs, strict=True))
        width = x_TI.shape[1] if combine is None else x_TI.shape[1] // 2
        shape = refs["out"].shape[1], width
        weights = Weights(refs, kind, first, shape, tiles.inputs)
        _kernel(refs, weights, tiles=tiles, combine=combine, bias=bias)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(pl.cdiv(shape[1], tiles.outputs), blocks.row_B.size),
        input_output_aliases=aliases,
        compiler_params=triton.CompilerParams(
            num_warps=tiles.warps, num_stages=tiles.stages
        ),
        interpret=rows.is_interpreted(),
        name="moe_edge_grouped",
    )
    return call(*given.values())


def _kernel(refs, weights: Weights, *, tiles, combine, bias):
    blocks_3B, x_TI, out_PO = refs["blocks"], refs["x"], refs["out"]
    outputs, width = weights.shape
    tile, block = pl.program_id(0), pl.program_id(1)
    record, row, count = (blocks_3B[part, block] for part in range(3))

    @pl.when(count > 0)
    def _():
        rows_M = row + jnp.arange(tiles.rows, dtype=jnp.int32)
        is_row_M = jnp.arange(tiles.rows, dtype=jnp.int32) < count
        is_row_M1 = is_row_M[:, None]
        if "source" in refs:
            source_M = triton.load(refs["source"].at[rows_M], mask=is_row_M, other=0)
        else:
            source_M = jnp.zeros_like(rows_M) if x_TI.shape[0] == 1 else rows_M
        outs_N = tile * tiles.outputs + jnp.arange(tiles.outputs, dtype=jnp.int32)
        is_out_N = outs_N < outputs

        def rows_of_x(column_C, is_in_C):
            at_MC = jnp.broadcast_to(column_C[None], (tiles.rows, column_C.size))
            row_MC = jnp.broadcast_to(source_M[:, None], at_MC.shape)
            known_MC = jnp.broadcast_to(is_row_M1, at_MC.shape)
            if is_in_C is not None:
                known_MC &= is_in_C[None]
            x_MC = triton.load(x_TI.at[row_MC, at_MC], mask=known_MC, other=0.0)
            if combine is not None:
                second = x_TI.at[row_MC, width + at_MC]
                x_MC = combine(x_MC, triton.load(second, mask=known_MC, other=0.0))
            return x_MC

        def add(turn, carry):
            sums_MN, scales = carry
            later = weights.scales(turn + 1, record, outs_N)
            for group in weights.tiles(turn, record, outs_N, scales):
                found_MN = sums_MN
                if group.scale_N is not None:
                    found_MN = jnp.zeros_like(sums_MN)
                for column_C, weight_NC, is_in_C in group.tiles:
                    x_MC = rows_of_x(column_C, is_in_C)
                    parts = split(x_MC, weight_NC.dtype, num_parts())
                    for part_MC in parts:
                        found_MN += lax.dot_general(
                            part_MC,
                            weight_NC,
                            (((1,), (1,)), ((), ())),
                            precision=PRECISION if len(parts) == 1 else None,
                            preferred_element_type=jnp.float32,
                        )
                if group.scale_N is not None:
                    found_MN = sums_MN + found_MN * group.scale_N[None]
                sums_MN = found_MN
            return sums_MN, later

        sums_MN = jnp.zeros((tiles.rows, tiles.outputs), jnp.float32)
        carry = sums_MN, weights.scales(0, record, outs_N)
        sums_MN, _ = lax.fori_loop(0, weights.turns, add, carry)
        if bias is not None:
            sums_MN += weights.biases(record, bias, outs_N)[None]
        if "scale" in refs:
            scale_M = triton.load(refs["scale"].at[rows_M], mask=is_row_M, other=0.0)
            sums_MN *= scale_M[:, None]
        out_MN = jnp.broadcast_to(outs_N[None], sums_MN.shape)
        row_MN = jnp.broadcast_to(rows_M[:, None], sums_MN.shape)
        known_MN = is_row_M1 & is_out_N[None]
        triton.store(out_PO.at[row_MN, out_MN], sums_MN, mask=known_MN)
