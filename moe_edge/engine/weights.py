"""From checkpoint arrays to the arrays that jitted steps take.

On a CPU, bfloat16 matrices are kept as their uint16 bits (`model/matvec.py` says
why). Vectors are widened to float32, which is exact and costs nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_edge.checkpoint.dtypes import all_finite
from moe_edge.checkpoint.schema import (
    check_tensors,
    dense_items,
    item_shapes,
    layer_shapes,
)
from moe_edge.core.checks import CheckpointError
from moe_edge.core.large_pages import LargePages
from moe_edge.core.progress import progress
from moe_edge.model.config import ModelConfig
from moe_edge.model.packed import Blocks, Packed
from moe_edge.model.quantised import Matrix, scales, stored_shape
from moe_edge.model.record import RecordLayout
from moe_edge.model.transformer import Block
from moe_edge.offload.store import device_dtype

Flat = dict[str, jax.Array | Packed]

_large_pages = LargePages()


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model's weights on the device."""

    config: ModelConfig
    top: Flat  # `embed`, `final_norm` and, unless tied, `head`
    layers: tuple[Flat, ...]  # per layer, canonical name -> array
    # Per layer the records `[E, R]`, None in dense layers and where an offloading
    # engine keeps them; of several devices `ShardedExperts`.
    experts: tuple[Any, ...]

    @property
    def num_bytes(self) -> int:
        return num_bytes((self.top, self.layers, self.experts))


def num_bytes(tree) -> int:
    """Bytes of arrays, or of what stands for their shapes."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


def _kept_dtype(ndim: int, stored: np.dtype) -> np.dtype:
    """The dtype of a stored array on the device."""
    return np.dtype(np.float32) if ndim == 1 else device_dtype(stored)


def kept(array: np.ndarray) -> np.ndarray:
    """A stored array as it is on the device; a view of it where bits stay the same."""
    dtype = _kept_dtype(array.ndim, array.dtype)
    same_bits = array.ndim > 1 and dtype.itemsize == array.dtype.itemsize
    return array.view(dtype) if same_bits else array.astype(dtype)


def to_device(array: np.ndarray) -> jax.Array:
    """One stored array on the device; always a copy, never a view of a file. On a CPU
    in large pages, if the system has some."""
    array = kept(array)
    is_host = jax.default_backend() == "cpu"
    room = _large_pages.empty(array.shape, array.dtype) if is_host else None
    if room is None:
        return jnp.array(array)
    np.copyto(room, array)
    return jax.device_put(room, may_alias=True)


def _room_for(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array to read into that `_own_to_device` need not copy, where that is so."""
    is_host = jax.default_backend() == "cpu"
    room = _large_pages.empty(shape, dtype) if is_host else None
    return np.empty(shape, dtype) if room is None else room


def _own_to_device(array: np.ndarray) -> jax.Array:
    """As `to_device`, of an array that nobody else holds: on a CPU it stays where it
    is, unless it has to be widened."""
    if jax.default_backend() != "cpu":
        return to_device(array)
    return jax.device_put(kept(array), may_alias=True)


def weight_shapes(reader) -> Weights:
    """What `load_weights` without experts would load: shapes and dtypes, no values.

    Raises:
      CheckpointError: names or shapes that do not fit the config.
    """

    config = reader.config

    def shapes(item) -> dict[str, jax.ShapeDtypeStruct | Packed]:
        dtypes, kinds = reader.dense_dtypes(item), reader.dense_kinds(item)
        named = item_shapes if isinstance(item, str) else layer_shapes

        def shaped(name, shape):
            if (kind := kinds.get(name)) is not None:
                codes = jax.ShapeDtypeStruct(stored_shape(kind, shape), np.uint8)
                return Blocks(codes, shape[1], kind)
            return jax.ShapeDtypeStruct(shape, _kept_dtype(len(shape), dtypes[name]))

        return {name: shaped(name, s) for name, s in named(config, item).items()}

    items = [item for item in dense_items(config) if isinstance(item, str)]
    top = {name: each for item in items for name, each in shapes(item).items()}
    layers = tuple(map(shapes, range(config.num_layers)))
    return Weights(config, top, layers, (None,) * config.num_layers)


def block_graph(config: ModelConfig, layer: int, kind=Block) -> nnx.GraphDef:
    """Structure of a layer's block, without memory for its weights."""
    return nnx.split(nnx.eval_shape(lambda: kind(config, layer, nnx.Rngs(0))))[0]


def bind_block(graph, flat: Mapping[str, jax.Array]) -> Block:
    """The module with its weights; call it while tracing."""
    paths = [(tuple(name.split(".")), nnx.Param(w)) for name, w in flat.items()]
    return nnx.merge(graph, nnx.from_flat_state(paths))


def load_weights(
    reader,
    put: Callable[[np.ndarray], jax.Array] = to_device,
    check_finite: bool = False,
    with_experts: bool = True,
    dense: Weights | None = None,
    put_experts: Callable[[int, np.ndarray], Any] | None = None,
    own_experts: range | None = None,
    mapped: bool = False,
) -> Weights:
    """Reads a whole checkpoint onto the device, layer by layer.

    Args:
      reader: an open checkpoint (`convert.open.open_checkpoint`).
      check_finite: refuse NaN and infinity, as conversion does.
      with_experts: False leaves them to a store; all entries are then None.
      dense: of this checkpoint, read before: only the experts are read then.
      put_experts: puts records `[E, R]` of a layer on the device; None: `put`.
      own_experts: those whose records alone are read; None: all.
      mapped: leave all experts where the system keeps the files of a checkpoint of
        ours, on a CPU (`offload.store.check_mappable`); they are checked all the same.
    Raises:
      CheckpointError: names or shapes that do not fit the config, or such values.
    """
    config, layout = reader.config, RecordLayout.of(reader.config)

    def place(where: str, name: str, array, numbers=None, put=put):
        if isinstance(array, Matrix):
            found = [np.ascontiguousarray(scales(array.kind, array.rows))]
            rows = place(where, name, array.rows, found)
            return Blocks(rows, array.shape[1], array.kind, layout.int8)
        if check_finite and not all(map(all_finite, numbers or [array])):
            raise CheckpointError(
                f"{where}: {name} has NaN or infinite values; to run it all the same, "
                "convert it with --allow_nonfinite"
            )
        return put(array)

    def read_dense(layer: int, where: str) -> Flat:
        arrays = reader.dense_layer(layer)
        shapes = {name: array.shape for name, array in arrays.items()}
        check_tensors(where, shapes, layer_shapes(config, layer))
        return {name: place(where, name, array) for name, array in arrays.items()}

    if dense is None:
        top = {name: place("top", name, array) for name, array in reader.top().items()}
    else:
        top = dense.top
    layers, experts = [], []
    for layer in progress(range(config.num_layers), "layers loaded"):
        where = f"layer {layer}"
        layers.append(dense.layers[layer] if dense else read_dense(layer, where))
        records = None
        if mapped and layer in config.moe_layers:
            records = _own_to_device(np.asarray(reader.experts(layer, True)))
        elif with_experts and layer in config.moe_layers:
            some = range(config.moe.num_experts) if own_experts is None else own_experts
            # Straight to where it stays, so that no layer is in memory twice.
            read = _room_for((len(some), layout.size), reader.dtype)
            if some:
                reader.read_experts(layer, some.start, read)
            given = where, "experts", read, layout.numbers(read)
            own_put = _own_to_device if put is to_device else put
            if put_experts is not None:
                own_put = functools.partial(put_experts, layer)
            records = place(*given, own_put)
        experts.append(records)
    return Weights(config, top, tuple(layers), tuple(experts))
