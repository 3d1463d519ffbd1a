"""A dense matrix that programs hold as it is stored, and decode as they read it.

Of the model itself it is in blocks of 32 (`quantised.py`): `Blocks`, which native
kernels read as stored. A shadow holds all its matrices at lower precision.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moe_edge.model import quantised
from moe_edge.model.matvec import dot

_STATIC = ("width", "kind", "int8")


def register_packed(kind: type) -> type:
    """Makes a dataclass a pytree; fields of _STATIC are no arrays.

    Not by `register_dataclass`: with it (JAX 0.10) the structures of two classes with
    equal fields compare equal, and jit may run the program of the other class.
    """
    fields = [field.name for field in dataclasses.fields(kind)]
    names = [name for name in fields if name not in _STATIC]
    static = [name for name in fields if name in _STATIC]

    def flatten(packed):
        values = tuple(getattr(packed, name) for name in static)
        return [getattr(packed, name) for name in names], values

    def unflatten(values, arrays):
        given = [*zip(static, values, strict=True), *zip(names, arrays, strict=True)]
        return kind(**dict(given))

    jax.tree_util.register_pytree_node(kind, flatten, unflatten)
    return kind


@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix `[O, I]`."""

    codes: jax.Array  # (..., O, stored width)
    width: int  # I

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.width)

    @property
    def nbytes(self) -> int:
        """As stored."""
        return sum(array.nbytes for array in jax.tree.leaves(self))

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def dtype(self):
        return self.codes.dtype

    def __getitem__(self, index):
        """Rows, as of an embedding table; `...` is the matrix itself (flax's way)."""
        if index is Ellipsis:
            return self
        return jax.tree.map(lambda array: array[index], self)

    def decode(self) -> jax.Array:
        """float32 `[..., O, I]`."""
        raise NotImplementedError

    def product(self, x_TI: jax.Array) -> jax.Array:
        """`x @ matrix.T`, as `matvec.linear` asks for it: float32 `[T, O]`."""
        return dot(x_TI, self.decode())


@register_packed
@dataclasses.dataclass(frozen=True)
class Blocks(Packed):
    """A dense matrix in blocks, its rows apart or in eights."""

    kind: str  # of `quantised.STORED_KINDS`
    int8: bool = False  # whether kernels of few vectors round these to 8 bits

    @property
    def shape(self) -> tuple[int, ...]:
        in_eights = quantised.is_interleaved(self.kind)
        rows = quantised.EIGHT if in_eights else 1
        return rows * self.codes.shape[0], self.width

    def __getitem__(self, index):
        if index is Ellipsis or not quantised.is_interleaved(self.kind):
            return super().__getitem__(index)
        eights = self.codes[index // quantised.EIGHT][..., None, :]
        return quantised.one_of_eight(quantised.decode(self.kind, eights), index)

    @property
    def in_blocks(self) -> jax.Array:
        """The rows as stored, for native kernels."""
        return self.codes

    def decode(self):
        return quantised.decode(self.kind, self.codes)

    def product(self, x_TI):
        if x_TI.shape[0] == 1 and jax.default_backend() != "cpu":
            # Without float32 weights, which a dot writes to memory.
            return jnp.sum(self.decode() * x_TI, axis=1)[None]
        return super().product(x_TI)
