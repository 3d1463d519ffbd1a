"""One hash of a model's weights, the same for an HF folder and its conversion.

content_sha256 = SHA-256 of the lines, sorted by tensor name,

    <HF name> TAB <dtype> TAB <shape, comma separated> TAB <SHA-256 of its bytes> LF

over all tensors that the model uses, as an unquantised HF folder of the same dtype
stores them (little-endian, row-major; dtype names as numpy's: bfloat16, float32, ..).
Of quantised weights that is the float32 they mean, as export writes them.
Hashing per tensor first makes the result independent of the order of reading, so
both formats are hashed in one pass, by several threads (stream.py).
"""

import hashlib
import math
from collections.abc import Iterable, Iterator

import numpy as np

from moe_edge.checkpoint.dtypes import all_finite
from moe_edge.checkpoint.schema import Item, Shapes
from moe_edge.convert import rules
from moe_edge.core.checks import CheckpointError
from moe_edge.model.quantised import EIGHT, Matrix

# Bytes of expert records that are in memory together. The page cache takes a few
# large writes in a fifth of the time of writes of half a megabyte.
CHUNK_BYTES = 32 << 20


class ContentHash:
    """Collects the tensors of a model, in pieces, in any order between tensors.

    Threads may add pieces of different tensors at once.
    """

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

    def lines(self, names: Iterable[str]) -> list[str]:
        """The lines of complete tensors."""
        return [self._lines[name] for name in names]

    def restore(self, lines: Iterable[str]) -> None:
        """Takes what `lines` gave, in place of the tensors."""
        self._lines |= {line.partition("\t")[0]: line for line in lines}

    def hexdigest(self) -> str:
        """The hash, once every tensor is complete."""
        missing = [name for name in self._shapes if name not in self._lines]
        if missing:
            raise CheckpointError(f"tensor {missing[0]} was not hashed completely")
        total = hashlib.sha256()
        for name in sorted(self._lines):
            total.update(self._lines[name].encode())
        return total.hexdigest()


def dense_pieces(config, item: Item, arrays: dict) -> Iterator[rules.Piece]:
    """An item's dense arrays as HF tensors, or parts of one in their order."""
    names, seen = rules.dense_names(config, item), {}
    for name, array in arrays.items():
        for strip in _strips(array):
            begin = seen.get(names[name], 0)
            yield rules.Piece(names[name], begin, np.ascontiguousarray(strip))
            seen[names[name]] = begin + strip.size


def _strips(array: np.ndarray | Matrix) -> Iterator[np.ndarray]:
    """An array; of one in blocks its rows decoded, some at a time."""
    if not isinstance(array, Matrix):
        yield array
        return
    rows, width = array.shape
    step = EIGHT * max(1, CHUNK_BYTES // (4 * EIGHT * width))
    for first in range(0, rows, step):
        yield array.part(first, step).decode()


def chunk_rows(reader, rows: int) -> int:
    """How many records are handled together."""
    return max(1, min(rows, CHUNK_BYTES // reader.layout.num_bytes(reader.dtype)))


def check_finite(piece: rules.Piece, advice: str) -> None:
    """Raises CheckpointError if a tensor holds NaN or infinity.

    Args:
      advice: what to do about it.
    """
    if not all_finite(piece.array):
        raise CheckpointError(
            f"tensor {piece.name} has NaN or infinite values (as "
            f"{piece.array.dtype.name}); {advice}"
        )
