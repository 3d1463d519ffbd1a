"""One direction of calls between two processes: a thread and a clique of two devices.

Both processes must run its programs in the same order, so one thread at each end runs
all of them. The clique of the other direction lists the devices the other way round,
which makes it another one: calls both ways at once do not wait for each other.
"""

import functools
import queue
import sys
import threading
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MIN_BYTES = 2048  # also enough for an error's text
_WORD = 4


def padded(size_bytes: int) -> int:
    """The next size, of 2^n or 3 x 2^n bytes, that holds a frame and its length."""
    size = MIN_BYTES
    while size < size_bytes + _WORD:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


class Lane(threading.Thread):
    """Runs work in order; work moves frames by `carry`.

    Args:
      caller, callee: process indices; one of them is this process's.
    """

    def __init__(self, caller: int, callee: int):
        super().__init__(name=f"moe_edge-{caller}-{callee}", daemon=True)
        devices = [_first_device(process) for process in (caller, callee)]
        self._device = devices[caller != jax.process_index()]
        mesh = Mesh(np.array(devices), ("process",))
        self._sharding = NamedSharding(mesh, PartitionSpec("process"))
        self._move = {
            up: jax.jit(
                jax.shard_map(
                    functools.partial(
                        jax.lax.ppermute,
                        axis_name="process",
                        perm=[(0, 1)] if up else [(1, 0)],
                    ),
                    mesh=mesh,
                    in_specs=PartitionSpec("process"),
                    out_specs=PartitionSpec("process"),
                )
            )
            for up in (True, False)
        }
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Has something done by this thread, in order."""
        self._work.put(work)

    def stop(self) -> None:
        """Ends the thread once its work is done, if it ever is."""
        self._work.put(None)

    def carry(self, frame: bytes | None, size_bytes: int, up: bool) -> bytes:
        """Moves a frame, together with the other process.

        Args:
          frame: to send; None to receive.
          size_bytes: as `padded`, the same at both ends.
          up: from the caller to the callee, or back.
        Returns:
          The frame that came; nothing where one was sent.
        """
        local = np.zeros(size_bytes // _WORD, np.int32)
        if frame is not None:
            local[0] = len(frame)
            local.view(np.uint8)[_WORD : _WORD + len(frame)] = np.frombuffer(
                frame, np.uint8
            )
        whole = jax.make_array_from_single_device_arrays(
            (2 * local.size,), self._sharding, [jax.device_put(local, self._device)]
        )
        moved = self._move[up](whole)
        moved.block_until_ready()
        if frame is not None:
            return b""
        words = np.asarray(moved.addressable_data(0))
        return words.view(np.uint8)[_WORD : _WORD + int(words[0])].tobytes()

    def run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # the other process has ended
                print(f"{self.name}: {str(error).splitlines()[:1]}", file=sys.stderr)


def _first_device(process: int) -> jax.Device:
    devices = jax.devices("cpu")
    return next(device for device in devices if device.process_index == process)
