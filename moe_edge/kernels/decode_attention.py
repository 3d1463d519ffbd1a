"""A step of decoding through attention on a GPU: between two products, one launch.

XLA makes a dozen small kernels of what stands between the products of q, k, v and that
of the output. Here one Triton kernel (Pallas) takes the products: biases, norms of q
and k, clipping, rotation, the write into the cache, and attention over the row's
positions. A program takes a row's kv head and some of its query heads.

Each place of a block of positions keeps a softmax of its own over the blocks, in
float32; they are joined once, at the end. So nothing in the loop waits for other warps.

Positions of long caches are cut into spans, which programs take side by side; a second
launch joins them. Cuts stand at fixed positions: the bits of a row depend neither on
the other rows nor on the cache's capacity.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels import rows, switches
from moe_edge.kernels.decode_heads import Heads
from moe_edge.kernels.softmax_parts import HIDDEN, Softmax

VARIABLE = "MOE_EDGE_DECODE_ATTENTION"
MOST_ROWS = 16
SPAN = 512  # positions of a program, a multiple of every block
WARPS = 16
VALUES = 32  # of a block of keys and of the sums of all heads, held by a thread
QUERY_HEADS = 4  # most of a program
JOINED = 8  # spans at once
# What is added to, multiplied with or joins the products, where a layer has it.
VECTORS = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "sinks")


def suits(rows_of_step: int, tokens: int) -> bool:
    """Whether a step of so many rows and tokens of each is to go through this kernel;
    see `is_asked`."""
    fits = tokens == 1 and rows_of_step <= MOST_ROWS
    return is_asked() and fits and rows.are_wanted()


def knows(attention) -> bool:
    """Whether the kernel computes such attention, an `AttentionConfig`."""
    plain_v = attention.value_dim == attention.head_dim and attention.value_scale == 1
    plain_v = plain_v and not (attention.v_norm or attention.k_is_v)
    plain_q = attention.qk_norm != "unit" and not attention.temperature
    plain_kv = plain_v and attention.cache_type == "float32"
    return plain_q and plain_kv and attention.rope is not None and not attention.chunked


def is_asked() -> bool:
    """Whether MOE_EDGE_DECODE_ATTENTION is 1.

    Raises:
      ConfigError: another value than 0 or 1.
    """
    return switches.chosen(VARIABLE, switches.OFF_ON, "0") == "1"


def describe() -> str:
    """How a step's attention runs on a GPU, for people."""
    return f"a step's attention by {'one kernel' if is_asked() else 'XLA'}"


def attend(
    products: dict[str, jax.Array],
    vectors: dict[str, jax.Array],
    cache: dict[str, jax.Array],
    tables: tuple[jax.Array, jax.Array],
    start_B: jax.Array,
    window: jax.Array,
    attention,
    eps: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Attention of one token a row.

    Args:
      products: q `[B, 1, H * P]`, k and v `[B, 1, G * P]`, float32.
      vectors: those of `VECTORS` that the layer has.
      cache: the layer's, see `model/kv_cache.py`; written in place if donated.
      tables: cosines and sines `[B, 1, dim / 2]`.
      start_B: int32, position of each row's token; behind the last one, the last.
      window: int32 scalar, how many latest positions a token sees.
      attention: the layer's `AttentionConfig`.
      eps: of the norms.
    Returns:
      (float32 `[B, H * P]`, the cache with the tokens).
    """
    B, G, P = start_B.size, attention.num_kv_heads, attention.head_dim
    H, shape = attention.num_heads, cache["k"].shape
    caches = {f"{name}_cache": cache[name].reshape(B * G, -1, P) for name in "kv"}
    spans = pl.cdiv(caches["k_cache"].shape[1], SPAN)
    given = {name: array.reshape(B, -1) for name, array in products.items()}
    given |= vectors | dict(zip(("cos", "sin"), tables, strict=True)) | caches
    given |= {"start": start_B, "window": jnp.asarray(window, jnp.int32).reshape(1)}
    for name in ("cos", "sin"):
        given[name] = given[name].reshape(B, -1)
    # The caches are read through the outputs alone: XLA copies what two arguments name.
    outputs = {name: (array.shape, array.dtype) for name, array in caches.items()}
    outputs["out"] = (B, H * P), jnp.float32
    if spans > 1:
        outputs["out"] = (B, H, spans, P), jnp.float32
        outputs |= {name: ((B, H, spans), jnp.float32) for name in ("top", "total")}
    names = [f"{name}_before" if name in caches else name for name in given]
    names += list(outputs)
    heads = min(QUERY_HEADS, pl.next_power_of_2(H // G))
    groups = pl.cdiv(H // G, heads)

    def kernel(*refs):
        refs = dict(zip(names, refs, strict=True))
        number, row = pl.program_id(1), pl.program_id(0)
        place = row, number // groups, number % groups, pl.program_id(2)
        _Step(refs, attention, eps, heads, *place).run()

    found = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(*each) for each in outputs.values()],
        grid=(B, G * groups, spans),
        input_output_aliases={
            list(given).index(name): list(outputs).index(name) for name in caches
        },
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=rows.is_interpreted(),
        name="moe_edge_decode_attention",
    )(*given.values())
    found = dict(zip(outputs, found, strict=True))
    if spans > 1:
        capacity = caches["k_cache"].shape[1]
        found["out"] = _join(found, given["start"], given["window"], capacity)
    cache = {name: found[f"{name}_cache"].reshape(shape) for name in "kv"}
    return found["out"].reshape(B, H * P), cache


def _seen(start_ref, window_ref, row, capacity: int):
    """First and last position that the row's token sees; the last is its own."""
    last = jnp.minimum(start_ref[row], capacity - 1)
    first = jnp.maximum(last - window_ref[row * 0] + 1, 0)
    return jnp.minimum(first, last), last


class _Step(NamedTuple):
    """What a program of the kernel knows."""

    refs: dict
    attention: object
    eps: float
    heads: int
    row: jax.Array
    kv_head: jax.Array
    group: jax.Array
    span: jax.Array

    def run(self) -> None:
        refs, capacity = self.refs, self.refs["k_cache"].shape[1]
        first, last = _seen(refs["start"], refs["window"], self.row, capacity)
        begin = jnp.maximum(first, self.span * SPAN)
        end = jnp.minimum(last + 1, (self.span + 1) * SPAN)

        @pl.when(begin < end)
        def _():
            self._attend(begin, jnp.minimum(end, last), last)

    def _attend(self, begin, end, last) -> None:
        """Positions from begin to before end, and the last one if it is here."""
        refs, attention = self.refs, self.attention
        P, ratio = attention.head_dim, attention.num_heads // attention.num_kv_heads
        columns_P = jnp.arange(pl.next_power_of_2(P), dtype=jnp.int32)
        width, values = columns_P.size, VALUES // max(2, self.heads)
        count = max(1, min(SPAN, values * WARPS * 32 // width))
        products = Heads(refs, attention, self.eps, self.row)
        first_head = self.group * self.heads
        heads = [
            self.kv_head * ratio + jnp.minimum(first_head + each, ratio - 1)
            for each in range(self.heads)
        ]
        queries_P = [
            each_P * attention.scale
            for each_P in products.rotated("q", heads, columns_P)
        ]
        numbers_C = jnp.arange(count, dtype=jnp.int32)
        cache_row = self.row * attention.num_kv_heads + self.kv_head

        def place(positions_C):
            shape = positions_C.size, width
            at = jnp.broadcast_to(positions_C[:, None], shape)
            columns = jnp.broadcast_to(columns_P[None], shape)
            return jnp.full(shape, cache_row), at, columns

        def add(block, states):
            at_C = block * count + numbers_C
            is_seen_C = (at_C >= begin) & (at_C < end)
            at = place(at_C)
            known = jnp.broadcast_to(is_seen_C[:, None], at[1].shape)
            if width > P:
                known &= at[2] < P
            k_CP, v_CP = (
                triton.load(refs[name].at[at], mask=known, other=0.0)
                for name in ("k_cache", "v_cache")
            )
            total_C, found = is_seen_C.astype(jnp.float32), []
            for state, q_P in zip(states, queries_P, strict=True):
                score_C = jnp.sum(k_CP * q_P[None], axis=1)
                top_C = jnp.where(is_seen_C, score_C, HIDDEN)
                found.append(state.joined(Softmax(top_C, total_C, v_CP)))
            return found

        states = [Softmax.empty(count, width) for _ in heads]
        blocks = begin // count, (end + count - 1) // count
        states = [each.whole() for each in lax.fori_loop(*blocks, add, states)]
        is_here = last < (self.span + 1) * SPAN
        (new_k_P,) = products.rotated("k", [self.kv_head], columns_P)
        new_v_P = products.plain("v", self.kv_head, columns_P)

        @pl.when(is_here & (self.group == 0))
        def _():
            at = place(jnp.full(1, last))
            for name, new_P in (("k_cache", new_k_P), ("v_cache", new_v_P)):
                triton.store(refs[name].at[at], new_P[None], mask=at[2] < P)

        for each, (head, state, q_P) in enumerate(
            zip(heads, states, queries_P, strict=True)
        ):
            own_1 = jnp.sum(q_P * new_k_P, axis=0, keepdims=True)
            total_1 = jnp.full(1, is_here.astype(jnp.float32))
            added = [(own_1, new_v_P)]
            if "sinks" in refs:
                sink_1 = jnp.full(1, refs["sinks"][head].astype(jnp.float32))
                added.append((sink_1, jnp.zeros_like(new_v_P)))
            for top_1, value_P in added:
                top_1 = jnp.where(is_here, top_1, HIDDEN)
                value_1P = jnp.where(is_here, value_P, 0.0)[None]
                state = state.joined(Softmax(top_1, total_1, value_1P))
            is_head = first_head + each < ratio
            self._store(state, head, columns_P[None], is_head)

    def _store(self, state: Softmax, head, columns_1P, is_head) -> None:
        refs, P = self.refs, self.attention.head_dim
        known_1P = (columns_1P < P) & is_head
        row_1P = jnp.full(columns_1P.shape, self.row)
        if "top" not in refs:
            y_1P = state.sum_CP / state.total_C[:, None]
            at = row_1P, head * P + columns_1P
            triton.store(refs["out"].at[at], y_1P, mask=known_1P)
            return
        at = [jnp.full(1, each) for each in (self.row, head, self.span)]
        triton.store(refs["top"].at[*at], state.top_C, mask=jnp.full(1, is_head))
        triton.store(refs["total"].at[*at], state.total_C, mask=jnp.full(1, is_head))
        at = [jnp.full(columns_1P.shape, each) for each in (head, self.span)]
        at = row_1P, *at, columns_1P
        triton.store(refs["out"].at[at], state.sum_CP, mask=known_1P)


def _join(parts: dict[str, jax.Array], start_B, window_1, capacity: int) -> jax.Array:
    """`[B, H, P]` of the spans that a row's token sees, `JOINED` at once."""
    B, H, spans, P = parts["out"].shape

    def kernel(top_ref, total_ref, out_ref, start_ref, window_ref, joined_ref):
        row, head = pl.program_id(0), pl.program_id(1)
        first, last = _seen(start_ref, window_ref, row, capacity)
        begin, end = first // SPAN, last // SPAN + 1
        numbers_J = jnp.arange(JOINED, dtype=jnp.int32)
        columns_P = jnp.arange(pl.next_power_of_2(P), dtype=jnp.int32)
        is_column_P = columns_P < P

        def add(turn, state):
            at_J = turn * JOINED + numbers_J
            known_J = (at_J >= begin) & (at_J < end)
            at = [jnp.full(at_J.shape, each) for each in (row, head)]
            top_J = triton.load(top_ref.at[*at, at_J], mask=known_J, other=HIDDEN)
            total_J = triton.load(total_ref.at[*at, at_J], mask=known_J, other=0.0)
            shape = JOINED, columns_P.size
            at = [jnp.full(shape, each) for each in (row, head)]
            at += [jnp.broadcast_to(at_J[:, None], shape)]
            at += [jnp.broadcast_to(columns_P[None], shape)]
            known_JP = known_J[:, None] & is_column_P[None]
            sum_JP = triton.load(out_ref.at[*at], mask=known_JP, other=0.0)
            return state.joined(Softmax(top_J, total_J, sum_JP))

        state = Softmax.empty(JOINED, columns_P.size)
        turns = begin // JOINED, (end + JOINED - 1) // JOINED
        state = lax.fori_loop(*turns, add, state).whole()
        at = [jnp.full((1, columns_P.size), each) for each in (row, head)]
        y_1P = state.sum_CP / state.total_C[:, None]
        at = joined_ref.at[*at, columns_P[None]]
        triton.store(at, y_1P, mask=is_column_P[None])

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((B, H, P), jnp.float32),
        grid=(B, H),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=rows.is_interpreted(),
        name="moe_edge_decode_attention_join",
    )(parts["top"], parts["total"], parts["out"], start_B, window_1)
