"""Readers that change how weights are held: floats -> quantised blocks, and back.

Each stands for another reader, so that hashing and writing need to know of neither.
"""

from typing import Any

import numpy as np

from moe_edge.checkpoint.dtypes import all_finite, cast, cast_dense
from moe_edge.checkpoint.manifest import with_kind
from moe_edge.checkpoint.reader import DenseReader
from moe_edge.checkpoint.schema import Item, dense_items, item_shapes
from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import BLOCK, EIGHT, IN_EIGHTS, Matrix
from moe_edge.model.quantising import encode
from moe_edge.model.record import RecordLayout
from moe_edge.model.shapes import may_be_blocks

_ROWS = 4096  # of a dense matrix that are encoded together


class Instead(DenseReader):
    """All of another reader but its weights."""

    def __init__(self, reader, kind: str | None, dtype: np.dtype):
        self._inner = reader
        self.config = with_kind(reader.config, kind or dtype.name)
        self.layout, self.dtype = RecordLayout.of(self.config), dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        """As of the inner reader; a record at a time, as float32 ones are large."""
        inner = self._inner
        if (self.layout, self.dtype) == (inner.layout, inner.dtype):
            inner.read_experts(layer, first, out_NR)
            return
        record_1R = np.empty((1, inner.layout.size), inner.dtype)
        for i, out_R in enumerate(out_NR):
            inner.read_experts(layer, first + i, record_1R)
            self._change(record_1R[0], out_R, f"layer {layer}, expert {first + i}")

    def _change(self, record_R: np.ndarray, out_R: np.ndarray, where: str) -> None:
        raise NotImplementedError


class Quantised(Instead):
    """A checkpoint of floats that is read quantised.

    Args:
      reader: of either format.
      kind: of the experts, one of `quantised.KINDS`; None: they are as the reader's.
      dense: of the dense matrices, the same.
    Raises:
      ConfigError: D or F that the kind's blocks do not fill.
    """

    def __init__(self, reader, kind: str | None, dense: str | None = None):
        kind = kind or reader.layout.kind
        super().__init__(reader, kind, np.dtype(np.uint8) if kind else reader.dtype)
        self._dense = dense

    @property
    def dense_kind(self) -> str | None:
        return self._dense or self._inner.dense_kind

    def dense_kinds(self, item: Item) -> dict[str, str]:
        shapes = item_shapes(self.config, item)
        own = {n: self._dense for n in shapes if self._is_encoded(n, shapes[n])}
        return self._inner.dense_kinds(item) | own

    def dense_dtypes(self, item: Item) -> dict[str, np.dtype]:
        in_blocks = dict.fromkeys(self.dense_kinds(item), np.dtype(np.float32))
        return self._inner.dense_dtypes(item) | in_blocks

    def dense(self, item: Item) -> dict[str, np.ndarray | Matrix]:
        """Canonical name -> array of one item, matrices in blocks.

        Raises:
          CheckpointError: NaN or infinity in one of these.
        """
        shapes = item_shapes(self.config, item)
        return {
            name: self._encoded(item, name, array)
            if self._is_encoded(name, shapes[name])
            else array
            for name, array in self._inner.dense(item).items()
        }

    def _is_encoded(self, name: str, shape: tuple[int, ...]) -> bool:
        return self._dense is not None and is_encoded(self.config, name, shape)

    def _encoded(self, item: Item, name: str, array) -> Matrix:
        if isinstance(array, Matrix) and array.kind == self._dense:
            return array
        strips = []
        for first in range(0, array.shape[0], _ROWS):
            if isinstance(array, Matrix):
                rows = array.part(first, _ROWS).decode()
            else:
                rows = array[first : first + _ROWS]
            where = f"layer {item}: {name}" if isinstance(item, int) else name
            _check_finite(rows, where, self._dense, "--dtype")
            strips.append(encode(self._dense, rows.astype(np.float32)))
        return Matrix(self._dense, np.concatenate(strips))

    def _change(self, record_R, out_R, where):
        layout = self._inner.layout
        if layout.kind is not None:  # of a GGUF file
            record_R = layout.decoded(record_R)
        _check_finite(record_R, where, self.layout.kind, "--expert_dtype")
        out_R[:] = self.layout.encode(record_R)


def _check_finite(array: np.ndarray, where: str, kind: str, flag: str) -> None:
    if not all_finite(np.ascontiguousarray(array)):
        raise CheckpointError(
            f"{where} has NaN or infinite weights, which {kind} cannot hold; leave "
            f"{flag} out to keep them"
        )


class Interleaved(Instead):
    """A checkpoint with blocks, whose rows are read in eights (`quantised.py`).

    Args:
      reader: of which no blocks are.
    """

    def __init__(self, reader):
        kind = reader.layout.kind and IN_EIGHTS[reader.layout.kind]
        super().__init__(reader, kind, reader.dtype)

    @property
    def dense_kind(self) -> str | None:
        items = map(self.dense_kinds, dense_items(self.config))
        kinds = {kind for found in items for kind in found.values()}
        return "+".join(sorted(kinds)) or None

    def dense_kinds(self, item: Item) -> dict[str, str]:
        shapes = item_shapes(self.config, item)
        return {
            name: kind if shapes[name][0] % EIGHT else IN_EIGHTS[kind]
            for name, kind in self._inner.dense_kinds(item).items()
        }

    def dense_dtypes(self, item: Item) -> dict[str, np.dtype]:
        return self._inner.dense_dtypes(item)

    def dense(self, item: Item) -> dict[str, np.ndarray | Matrix]:
        return {
            name: array.interleaved() if isinstance(array, Matrix) else array
            for name, array in self._inner.dense(item).items()
        }

    def _change(self, record_R, out_R, where):
        out_R[:] = self._inner.layout.interleaved(record_R)


def is_encoded(config: ModelConfig, name: str, shape: tuple[int, ...]) -> bool:
    """Whether `Quantised` has blocks of a dense weight.

    Of the embedding only where it is the head, too: a step reads a row of it.
    """
    is_read = name != "embed" or config.tie_embeddings
    return is_read and may_be_blocks(name, shape, BLOCK)


def not_whole(config: ModelConfig) -> set[str]:
    """Names of dense matrices that blocks do not fill, so that they stay floats."""
    shapes = [
        (name, shape)
        for item in dense_items(config)
        for name, shape in item_shapes(config, item).items()
    ]
    return {
        name
        for name, shape in shapes
        if len(shape) == 2
        and is_encoded(config, name, (BLOCK, BLOCK))
        and not is_encoded(config, name, shape)
    }


class Dequantised(Instead):
    """A quantised checkpoint that is read as numbers.

    Args:
      reader: of our format, or of a GGUF file.
      dtype: of the numbers; None: float32, which holds them exactly.
    Attributes:
      kind: of what it reads: of its experts, or of its dense matrices.
    """

    def __init__(self, reader, dtype: np.dtype | None = None):
        is_float = reader.layout.kind is None and dtype is None
        own = reader.dtype if is_float else dtype or np.dtype(np.float32)
        super().__init__(reader, None, own)
        self.kind = reader.layout.kind or reader.dense_kind
        self._cast, self.dense_kind = dtype, None

    def dense_kinds(self, item: Item) -> dict[str, str]:
        return {}

    def dense_dtypes(self, item: Item) -> dict[str, np.dtype]:
        found = self._inner.dense_dtypes(item)
        empty = {name: np.empty(0, dtype) for name, dtype in found.items()}
        return {n: cast_dense(n, array, self._cast).dtype for n, array in empty.items()}

    def dense(self, item: Item) -> dict[str, np.ndarray]:
        arrays = self._inner.dense(item)
        return {
            name: cast_dense(
                name,
                array.decode() if isinstance(array, Matrix) else array,
                self._cast,
            )
            for name, array in arrays.items()
        }

    def _change(self, record_R, out_R, where):
        out_R[:] = cast(self._inner.layout.decoded(record_R), self.dtype)
