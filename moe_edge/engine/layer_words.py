"""What the host and the programs of a layer tell one another, as words of 32 bits.

On a GPU an array that the host reads costs 300 us, one that it passes to a program 100,
however small. So all that a layer's host reads leaves its program as one int32 array in
pinned host memory, and all that it decides lies in one, which the program reads there.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.offload.store import host_sharding


class Reads(NamedTuple):
    """What the host reads of a layer beside the ids. What it does not read costs no
    operation to pack: ids alone leave as the router wrote them."""

    weights: bool  # stay on the device otherwise
    scores: bool
    hidden: bool


def pack(arrays: Sequence[jax.Array]) -> jax.Array:
    """int32 [n]: the bits of int32 and float32 arrays, one behind the other."""
    words = [jax.lax.bitcast_convert_type(each, jnp.int32) for each in arrays]
    return jnp.concatenate([each.reshape(-1) for each in words])


def split(words, shapes: Sequence[tuple[tuple[int, ...], type]]) -> list:
    """The arrays that words hold, in order: NumPy's as views.

    Args:
      words: int32 [n], of NumPy or while tracing.
      shapes: (shape, dtype of 4 bytes) of each; -1 in the last one: all that is left.
    """
    found, first = [], 0
    for shape, dtype in shapes:
        end = None if -1 in shape else first + int(np.prod(shape))
        part = words[first:end]
        if isinstance(words, np.ndarray):
            part = part.view(dtype)
        else:
            part = jax.lax.bitcast_convert_type(part, dtype)
        found.append(part.reshape(shape))
        first = end
    return found


class PinnedWords:
    """Words that the host writes and programs read, an array a place and size.

    Contract: `put` to a place may follow the last one there once every program that
    read it has run. JAX cannot check this: it takes arrays as constant.

    Args:
      device: that reads them.
    """

    def __init__(self, device: jax.Device):
        self._there = host_sharding(device)
        self._held: dict[tuple[int, int], tuple[jax.Array, np.ndarray]] = {}

    def put(self, place: int, parts: Sequence[np.ndarray]) -> jax.Array:
        """int32 [n] in pinned memory: the bits of parts, whose values have 4 bytes."""
        size = sum(part.size for part in parts)
        held = self._held.get((place, size))
        if held is None:
            held = self._held[place, size] = _new_words(size, self._there)
        array, view = held
        first = 0
        for part in parts:
            view[first : first + part.size] = part.reshape(-1).view(np.int32)
            first += part.size
        return array


def _new_words(size: int, there) -> tuple[jax.Array, np.ndarray]:
    """An array in pinned memory and its memory, to write."""
    array = jax.device_put(np.zeros(size, np.int32), there, may_alias=False)
    array.block_until_ready()
    address = array.unsafe_buffer_pointer()
    raw = (ctypes.c_int32 * size).from_address(address)
    return array, np.frombuffer(raw, np.int32)
