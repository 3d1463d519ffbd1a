"""How a shadow's weights are held and multiplied: at lower precision.

OD-MoE (arXiv 2512.03927, section 3.2) predicts experts by a copy of the model at lower
precision. Its weights stay at that size: kernels decode what they read.

  fp16, bf16  rounded weights, and rounded activations: inputs and results of products
              (weights alone would often be exact: checkpoints are bfloat16)
  int8        codes -127..127 and a float32 scale a row
  nf4         4-bit codes of the NormalFloat table (QLoRA, arXiv 2305.14314), and for
              every 64 weights of a row their largest magnitude, in bfloat16
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.checks import check_known
from moe_edge.core.float32 import to_float32
from moe_edge.model.matvec import MAX_LANE_ROWS, MAX_TERMS, dot, lane_product, num_lanes
from moe_edge.model.packed import Packed, register_packed

HALVES = {"fp16": jnp.float16, "bf16": jnp.bfloat16}
BLOCK = 64  # weights of a row that share a scale (nf4)
CODES = 4  # nf4 codes in a word of 16 bits
WORDS = BLOCK // CODES  # of a block: the lanes of its product
# Quantiles of a normal distribution between -1 and 1, zero among them.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


def round_to(x: jax.Array, kind: str | None) -> jax.Array:
    """float32 values that `fp16` or `bf16` can hold; None leaves x as it is."""
    if kind is None:
        return x
    info = jnp.finfo(HALVES[kind])
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _columns_of(array, first: int, count: int, at):
    if at is None:
        return array[:, first : first + count]
    # Slices of the argument itself: a slice of a slice would be copied first.
    return lax.dynamic_slice(array, (at, 0, first), (1, array.shape[1], count))[0]


def _matrix_of(array, at):
    return array if at is None else lax.dynamic_index_in_dim(array, at, 0, False)


@dataclasses.dataclass(frozen=True)
class LowPrecision(Packed):
    """A matrix `[O, I]`, or a stack of them: a leading axis that `at` indexes."""

    rounding: ClassVar[str | None] = None  # of inputs and results of products

    def decode(self, at=None) -> jax.Array:
        """float32 `[..., O, I]`, or the matrix `at` of a stack."""
        raise NotImplementedError

    def _lanes(self) -> int | None:
        return num_lanes(self.width)

    def _columns(self, first: int, count: int, at=None) -> jax.Array:
        """Weights of some columns as `to_float32` takes them."""
        return _columns_of(self.codes, first, count, at)

    def _row_scale(self, at=None) -> jax.Array | None:
        """Factors `[O, 1]` of the result of a product of `_columns`."""
        return None

    @property
    def has_lanes(self) -> bool:
        """Whether `lane_product` suits it."""
        return bool(self._lanes()) and jax.default_backend() == "cpu"

    def multiply(self, x_I: jax.Array, at=None) -> jax.Array:
        """`matrix @ x` of one vector, as `has_lanes` allows; nothing is rounded."""
        columns = functools.partial(self._columns, at=at)
        return lane_product(x_I, columns, self._lanes(), self._row_scale(at))

    def product(self, x_TI: jax.Array) -> jax.Array:
        """`x @ matrix.T`, as `matvec.linear` asks for it: float32 `[T, O]`."""
        x_TI = round_to(x_TI, self.rounding)
        if x_TI.shape[0] <= MAX_LANE_ROWS and self.has_lanes:
            y_TO = jnp.stack([self.multiply(x_I) for x_I in x_TI])
        else:
            y_TO = dot(x_TI, self.decode())
        return round_to(y_TO, self.rounding)


class _Half(LowPrecision):
    """Two bytes a weight, as bits: XLA:CPU widens whole arrays of 16-bit floats."""

    @classmethod
    def encode(cls, weight: jax.Array) -> "_Half":
        limit = float(jnp.finfo(HALVES[cls.rounding]).max)
        kept = jnp.clip(weight, -limit, limit).astype(HALVES[cls.rounding])
        return cls(lax.bitcast_convert_type(kept, jnp.uint16), weight.shape[-1])

    def _widen(self, bits):
        half = lax.bitcast_convert_type(bits, HALVES[self.rounding])
        return half.astype(jnp.float32)

    def decode(self, at=None):
        return self._widen(_matrix_of(self.codes, at))

    def _columns(self, first, count, at=None):
        return self._widen(super()._columns(first, count, at))


@register_packed
@dataclasses.dataclass(frozen=True)
class Float16(_Half):
    """IEEE half precision."""

    rounding: ClassVar[str] = "fp16"


@register_packed
@dataclasses.dataclass(frozen=True)
class BFloat16(_Half):
    """The upper half of a float32."""

    rounding: ClassVar[str] = "bf16"

    def _widen(self, bits):
        return to_float32(bits)


@register_packed
@dataclasses.dataclass(frozen=True)
class Int8(LowPrecision):
    """Symmetric, a scale a row."""

    scales: jax.Array  # float32 (..., O, 1)

    @classmethod
    def encode(cls, weight: jax.Array) -> "Int8":
        scales = jnp.max(jnp.abs(weight), axis=-1, keepdims=True) / 127
        codes = jnp.round(weight / jnp.where(scales == 0, 1.0, scales))
        return cls(codes.astype(jnp.int8), weight.shape[-1], scales)

    def decode(self, at=None):
        codes, scales = _matrix_of(self.codes, at), _matrix_of(self.scales, at)
        return codes.astype(jnp.float32) * scales

    def _row_scale(self, at=None):
        return _columns_of(self.scales, 0, 1, at)


@register_packed
@dataclasses.dataclass(frozen=True)
class Nf4(LowPrecision):
    """Words of 16 bits hold four codes each. Bits 4 q .. 4 q + 3 of a block's word j
    are its weight 16 q + j, so that a product reads runs of lanes."""

    scales: jax.Array  # bfloat16 bits, uint16 (..., O, blocks)

    @classmethod
    def encode(cls, weight: jax.Array) -> "Nf4":
        width = weight.shape[-1]
        fill = [(0, 0)] * (weight.ndim - 1) + [(0, -width % BLOCK)]
        blocks = jnp.pad(weight, fill).reshape(*weight.shape[:-1], -1, BLOCK)
        scales = jnp.max(jnp.abs(blocks), axis=-1).astype(jnp.bfloat16)
        whole = scales.astype(jnp.float32)[..., None]
        share = blocks / jnp.where(whole == 0, 1.0, whole)
        codes = sum(
            (share > (low + high) / 2).astype(jnp.uint16)
            for low, high in zip(NF4[:-1], NF4[1:], strict=True)
        )
        words = sum(
            codes[..., WORDS * q : WORDS * (q + 1)] << (CODES * q) for q in range(CODES)
        )
        words = words.reshape(*weight.shape[:-1], -1)
        return cls(words, width, lax.bitcast_convert_type(scales, jnp.uint16))

    def decode(self, at=None):
        words, scales = _matrix_of(self.codes, at), _matrix_of(self.scales, at)
        words = words.reshape(*scales.shape, WORDS)
        codes = jnp.concatenate([_code(words, q) for q in range(CODES)], axis=-1)
        weight = _level(codes) * to_float32(scales)[..., None]
        return weight.reshape(*scales.shape[:-1], -1)[..., : self.width]

    def _lanes(self):
        terms = self.width // WORDS
        return WORDS if self.width % BLOCK == 0 and terms <= 4 * MAX_TERMS else None

    def _columns(self, first, count, at=None):
        block, q = divmod(first // count, CODES)
        words = super()._columns(block * WORDS, WORDS, at)
        scale_O1 = to_float32(_columns_of(self.scales, block, 1, at))
        return _level(_code(words, q)) * scale_O1


def _code(words: jax.Array, q: int) -> jax.Array:
    """The q-th code of every word."""
    return (words >> (4 * q)) & 15


def _level(codes: jax.Array) -> jax.Array:
    """The table's value of every code 0..15.

    A tree of choices by the bits: on XLA:CPU 2.4 times (D 192) to 10 times (D 768) as
    fast as reading a table.
    """
    level = list(NF4)
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        pairs = zip(level[0::2], level[1::2], strict=True)
        level = [jnp.where(is_set, odd, even) for even, odd in pairs]
    return level[0].astype(jnp.float32)


FORMATS: dict[str, type[LowPrecision]] = {
    "fp16": Float16,
    "bf16": BFloat16,
    "int8": Int8,
    "nf4": Nf4,
}


def pack(weight: jax.Array, name: str) -> LowPrecision:
    """A float32 matrix, or a stack of them, in the format `name`."""
    check_known("weight format", name, FORMATS)
    return FORMATS[name].encode(weight)
