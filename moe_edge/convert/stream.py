"""Moves a model's weights from a reader to a sink by all cores, and hashes them.

A task is a few expert records, or the hashing of one dense tensor; threads take them in
order, as NumPy, zlib, hashlib and the system calls leave the interpreter to others.
Each thread has one buffer of records, and tasks of two layers at most are under way, so
memory is bounded by the number of threads and not by the model.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from moe_edge.checkpoint.schema import Item, dense_items
from moe_edge.convert import rules
from moe_edge.convert.content_hash import (
    ContentHash,
    check_finite,
    chunk_rows,
    dense_pieces,
)
from moe_edge.convert.unfinished import Unfinished
from moe_edge.core.process import cpu_cores
from moe_edge.core.progress import counter

MAX_WORKERS = 16  # more would wait for the disk, or for memory


def content_sha256(reader) -> str:
    """Hashes a checkpoint by reading it once."""
    return stream(reader, None, allow_nonfinite=True)


def stream_items(config) -> list[Item]:
    """All dense items in the order of `stream`: the top last, as it is large, and by
    then Orbax has been imported."""
    return sorted(dense_items(config), key=lambda item: isinstance(item, str))


def stream(
    reader,
    sink,
    allow_nonfinite: bool,
    shown: bool = True,
    workers: int = 0,
    unfinished: Unfinished | None = None,
    most: int | None = None,
) -> str | None:
    """Moves the weights from a reader to a sink, layer by layer.

    Args:
      sink: of `sinks.py`; None: the weights are only hashed.
      allow_nonfinite: accept NaN and infinity.
      shown: show progress.
      workers: threads; 0: one a core.
      unfinished: notes each item that is complete; those noted before are left out.
      most: items that are moved at most; None: all.
    Returns:
      The content hash; None where items are left.
    Raises:
      CheckpointError: NaN or infinity.
    """
    items = stream_items(reader.config)
    mover = _Mover(reader, sink, allow_nonfinite, workers or cpu_cores())
    done = {} if unfinished is None else unfinished.done(items)
    for item, facts in done.items():
        mover.content.restore(facts["lines"])
        sink.restore(item, facts["sink"])
    left = [item for item in items if item not in done]
    try:
        with counter("layers", len(items), shown) as count:
            count(len(done))
            for item in mover.moved(left[:most]):
                if unfinished is not None:
                    lines = mover.content.lines(rules.item_names(reader.config, item))
                    facts = {"lines": lines, "sink": sink.facts(item)}
                    unfinished.note(item, facts)
                count(1)
    finally:
        mover.close()
    all_moved = most is None or most >= len(left)
    return mover.content.hexdigest() if all_moved else None


class _Mover:
    """The threads of one stream.

    Attributes:
      content: the hashes of the tensors.
    """

    def __init__(self, reader, sink, allow_nonfinite: bool, workers: int):
        self._reader, self._sink = reader, sink
        self._allow_nonfinite, workers = allow_nonfinite, min(workers, MAX_WORKERS)
        self.config = config = reader.config
        self.content = ContentHash(rules.hf_shapes(config))
        rows = config.moe.num_experts
        self._step = min(chunk_rows(reader, rows), -(-rows // workers))
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
        self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(workers):  # pages are taken when they are first written
            size = self._step, reader.layout.size
            self._buffers.put(np.empty(size, reader.dtype))
        # Of experts in one tensor a layer, hashing is in their order.
        self._in_turn = rules.is_fused(config)

    def close(self) -> None:
        """Ends the threads; tasks that have not begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    def moved(self, items: Iterable[Item]) -> Iterator[Item]:
        """Moves items; yields each once all of it has been given to the sink."""
        pending: deque[tuple[Item, list[Future]]] = deque()
        for item in items:
            arrays = self._reader.dense(item)
            futures = [
                self._pool.submit(self._examine, pieces)
                for pieces in self._by_tensor(item, arrays)
            ]
            futures += self._submit_experts(item)
            if self._sink is not None:
                self._sink.dense(item, arrays)
            del arrays
            pending.append((item, futures))
            if len(pending) == 2:
                yield self._ended(*pending.popleft())
        if pending:
            yield self._ended(*pending.popleft())

    def _ended(self, item: Item, futures: list[Future]) -> Item:
        for future in futures:
            future.result()
        self._reader.release()
        return item

    def _by_tensor(self, item: Item, arrays: dict[str, Any]):
        """The pieces of each tensor; several arrays may be one."""
        of: dict[str, dict[str, Any]] = {}
        for name, hf_name in rules.dense_names(self.config, item).items():
            of.setdefault(hf_name, {})[name] = arrays[name]
        return [dense_pieces(self.config, item, each) for each in of.values()]

    def _submit_experts(self, item: Item) -> list[Future]:
        if item not in self.config.moe_layers:
            return []
        futures, before = [], None
        for first in range(0, self.config.moe.num_experts, self._step):
            after = threading.Event()
            task = item, first, before, after
            futures.append(self._pool.submit(self._move, *task))
            before = after
        return futures

    def _move(
        self,
        layer: int,
        first: int,
        before: threading.Event | None,
        after: threading.Event,
    ) -> None:
        """Some records of a layer.

        Args:
          before: the records before these have been hashed; None: there are none.
          after: these have been.
        """
        buffer = self._buffers.get()
        try:
            records = buffer[: self.config.moe.num_experts - first]
            self._reader.read_experts(layer, first, records)
            self._reader.release()
            pieces = rules.records_to_hf(self.config, layer, first, records)
            if self._in_turn and before is not None:
                before.wait()
            self._examine(pieces)
            after.set()
            if self._sink is not None:
                self._sink.experts(layer, first, records)
        finally:
            after.set()  # whoever waits fails by the order of its pieces
            self._buffers.put(buffer)

    def _examine(self, pieces: Iterable[rules.Piece]) -> None:
        """Checks and hashes a tensor while the processor's cache holds it."""
        for piece in pieces:
            if not self._allow_nonfinite:
                check_finite(
                    piece,
                    "add --allow_nonfinite to keep them, or choose another --dtype if "
                    "the cast overflowed",
                )
            self.content.add(piece)
