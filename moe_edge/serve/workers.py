"""Long work on requests in threads of their own, so that the event loop goes on."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from moe_edge.serve.errors import refusal
from moe_edge.serve.guards import ClientGone, until_gone

T = TypeVar("T")

SHORT_BYTES = 2048  # of a body: a text of that takes the tokenizer a millisecond or two


class Workers:
    """Does what is short at once, all else in threads.

    The tokenizer leaves Python's lock alone meanwhile.

    Args:
      name: of the threads.
      most_bytes: of bodies that are read or wait for it: how long the last one waits
        goes by their size, not their number.
    """

    def __init__(self, name: str, threads: int, most_bytes: float = math.inf):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most_bytes, self._num_bytes = most_bytes, 0

    def has_room(self, body: bytes) -> bool:
        """Whether a body may be read, or wait for it."""
        if len(body) <= SHORT_BYTES:
            return True
        return self._num_bytes + len(body) <= self._most_bytes

    async def read(
        self,
        receive: Receive,
        do: Callable[..., T],
        body: bytes,
        *given,
        is_short: bool = True,
    ) -> T:
        """`do(body, *given)`; never begun if the client goes before.

        Args:
          is_short: whether a short body takes no time worth a thread.
        Raises:
          ApiError: queue_full: there is no room.
          ClientGone: before the end.
        """
        if is_short and len(body) <= SHORT_BYTES:
            return do(body, *given)
        size = max(len(body), SHORT_BYTES)
        if self._num_bytes + size > self._most_bytes:
            raise refusal("queue_full")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, do, body, *given)
        gone = asyncio.create_task(until_gone(receive, work.cancel))
        self._num_bytes += size
        try:
            await asyncio.wait([work])
            if work.cancelled():
                raise ClientGone
            return work.result()
        finally:
            self._num_bytes -= size
            work.cancel()
            gone.cancel()

    async def run(self, size: int, do: Callable[..., T], *given) -> T:
        """`do(*given)`, which handles so many bytes."""
        if size <= SHORT_BYTES:
            return do(*given)
        return await asyncio.get_running_loop().run_in_executor(self._pool, do, *given)
