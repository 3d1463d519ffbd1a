"""One hash of a model's weights, the same for an HF folder and its conversion.

content_sha256 = SHA-256 of the lines, sorted by tensor name,

    <HF name> TAB <dtype> TAB <shape, comma separated> TAB <SHA-256 of its bytes> LF

over all tensors that the model uses, as an unquantised HF folder of the same dtype
stores them (little-endian, row-major; dtype names as numpy's: bfloat16, float32, ..).
Hashing per tensor first makes the result independent of the order of reading, so
both formats are hashed in one pass, layer by layer.
"""

import hashlib
import math

import numpy as np

from moe_edge.checkpoint.schema import Item, Shapes, dense_items
from moe_edge.convert import rules
from moe_edge.core.checks import CheckpointError
from moe_edge.core.progress import progress

# Bytes of expert records that are in memory together. The page cache takes a few
# large writes in a fifth of the time of writes of half a megabyte.
CHUNK_BYTES = 32 << 20


class ContentHash:
    """Collects the tensors of a model, in pieces, in any order between tensors."""

    def __init__(self, shapes: Shapes):
        self._shapes = shapes
        self._open: dict[str, tuple] = {}  # name -> (hash, elements so far)
        self._lines: dict[str, str] = {}

    def add(self, piece: rules.Piece) -> None:
        """Adds the next bytes of a tensor; its pieces must come in order."""
        name, first, array = piece
        digest, seen = self._open.pop(name, (None, 0))
        digest = digest or hashlib.sha256()
        if first != seen or name in self._lines:
            raise CheckpointError(
                f"pieces of {name} out of order: element {first} after {seen}"
            )
        digest.update(array.reshape(-1).view(np.uint8))
        seen += array.size
        if seen < math.prod(self._shapes[name]):
            self._open[name] = (digest, seen)
            return
        shape = ",".join(map(str, self._shapes[name]))
        self._lines[name] = (
            f"{name}\t{array.dtype.name}\t{shape}\t{digest.hexdigest()}\n"
        )

    def hexdigest(self) -> str:
        """The hash, once every tensor is complete."""
        missing = [name for name in self._shapes if name not in self._lines]
        if missing:
            raise CheckpointError(f"tensor {missing[0]} was not hashed completely")
        total = hashlib.sha256()
        for name in sorted(self._lines):
            total.update(self._lines[name].encode())
        return total.hexdigest()


def dense_pieces(config, item: Item, arrays: dict) -> list[rules.Piece]:
    """An item's dense arrays as whole HF tensors."""
    names = rules.dense_names(config, item)
    return [
        rules.Piece(names[name], 0, np.ascontiguousarray(array))
        for name, array in arrays.items()
    ]


def chunk_rows(layout, itemsize: int, rows: int) -> int:
    """How many records are handled together."""
    return max(1, min(rows, CHUNK_BYTES // (layout.size * itemsize)))


def content_sha256(reader) -> str:
    """Hashes a checkpoint by reading it once."""
    config = reader.config
    content = ContentHash(rules.hf_shapes(config))
    rows = config.moe.num_experts
    step = chunk_rows(reader.layout, reader.dtype.itemsize, rows)
    buffer = np.empty((step, reader.layout.size), reader.dtype)
    for item in progress(dense_items(config), "layers hashed"):
        for piece in dense_pieces(config, item, reader.dense(item)):
            content.add(piece)
        if item in config.moe_layers:
            for first in range(0, rows, step):
                records = buffer[: min(step, rows - first)]
                reader.read_experts(item, first, records)
                for piece in rules.records_to_hf(config, item, first, records):
                    content.add(piece)
        reader.release()
    return content.hexdigest()
