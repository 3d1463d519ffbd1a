"""Long work on requests in threads of their own, so that the event loop goes on."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from moe_edge.serve.call import refusal
from moe_edge.serve.guards import ClientGone, until_gone

T = TypeVar("T")

SHORT_BYTES = 2048  # of a body: a text of that takes the tokenizer a millisecond or two


class Workers:
    """Reads bodies: short ones at once, others in a thread.

    The tokenizer leaves Python's lock alone meanwhile.

    Args:
      most_open: bodies that are read or wait for it; connections bound them, too.
    """

    def __init__(self, threads: int, most_open: float = math.inf):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bodies")
        self._most_open, self._num_open = most_open, 0

    async def read(
        self, receive: Receive, do: Callable[..., T], body: bytes, *given
    ) -> T:
        """`do(body, *given)`; never begun if the client goes before.

        Raises:
          ApiError: queue_full.
          ClientGone: before the end.
        """
        if len(body) <= SHORT_BYTES:
            return do(body, *given)
        if self._num_open >= self._most_open:
            raise refusal("queue_full")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, do, body, *given)
        gone = asyncio.create_task(until_gone(receive, work.cancel))
        self._num_open += 1
        try:
            await asyncio.wait([work])
            if work.cancelled():
                raise ClientGone
            return work.result()
        finally:
            self._num_open -= 1
            work.cancel()
            gone.cancel()

    async def run(self, size: int, do: Callable[..., T], *given) -> T:
        """`do(*given)`, which handles so many bytes."""
        if size <= SHORT_BYTES:
            return do(*given)
        return await asyncio.get_running_loop().run_in_executor(self._pool, do, *given)
