"""One hash of a model's weights, the same for an HF folder and its conversion.

content_sha256 = SHA-256 of the lines, sorted by tensor name,

    <HF name> TAB <dtype> TAB <shape, comma separated> TAB <SHA-256 of its bytes> LF

over all tensors that the model uses, as an unquantised HF folder of the same dtype
stores them (little-endian, row-major; dtype names as numpy's: bfloat16, float32, ..).
Of quantised weights that is the float32 they mean, as export writes them.
Hashing per tensor first makes the result independent of the order of reading, so
both formats are hashed in one pass, layer by layer.
"""

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moe_edge.checkpoint.dtypes import all_finite
from moe_edge.checkpoint.schema import Item, Shapes, dense_items
from moe_edge.convert import rules
from moe_edge.core.checks import CheckpointError
from moe_edge.core.progress import progress
from moe_edge.model.quantised import EIGHT, Matrix

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


def content_sha256(reader) -> str:
    """Hashes a checkpoint by reading it once."""
    return stream(reader, None, allow_nonfinite=True)


def stream(reader, sink, allow_nonfinite: bool, shown: bool = True) -> str:
    """Moves the weights from a reader to a sink, layer by layer.

    One thread reads and writes, a second hashes and checks.

    Args:
      sink: of `sinks.py`; None: the weights are only hashed.
      allow_nonfinite: accept NaN and infinity.
      shown: show progress.
    Returns:
      The content hash.
    Raises:
      CheckpointError: NaN or infinity.
    """
    config = reader.config
    content = ContentHash(rules.hf_shapes(config))

    def examine(pieces: Iterable[rules.Piece]) -> None:
        """Checks and hashes a tensor while the processor's cache holds it."""
        for piece in pieces:
            if not allow_nonfinite:
                check_finite(
                    piece,
                    "add --allow_nonfinite to keep them, or choose another --dtype if "
                    "the cast overflowed",
                )
            content.add(piece)

    rows = config.moe.num_experts
    step = chunk_rows(reader, rows)
    buffers = itertools.cycle(np.empty((2, step, reader.layout.size), reader.dtype))
    # One worker, so that the pieces of a tensor are hashed in order.
    with ThreadPoolExecutor(1) as pool:
        pending = deque([], maxlen=2)  # of the records in either buffer
        # The top last: it is large, and by then Orbax has been imported.
        items = sorted(dense_items(config), key=lambda item: isinstance(item, str))
        for item in progress(items, "layers", shown=shown):
            arrays = reader.dense(item)
            examined = pool.submit(examine, dense_pieces(config, item, arrays))
            if sink is not None:
                sink.dense(item, arrays)
            examined.result()
            reader.release()
            for first in range(0, rows if item in config.moe_layers else 0, step):
                if len(pending) == pending.maxlen:
                    pending[0].result()  # this buffer is free again
                records = next(buffers)[: min(step, rows - first)]
                reader.read_experts(item, first, records)
                pieces = rules.records_to_hf(config, item, first, records)
                pending.append(pool.submit(examine, pieces))
                if sink is not None:
                    sink.experts(item, first, records)
                reader.release()
        for future in pending:
            future.result()
    return content.hexdigest()
