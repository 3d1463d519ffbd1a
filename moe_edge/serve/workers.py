"""Long work on requests in threads of their own, so that the event loop goes on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SHORT_BYTES = 2048  # of a body: a text of that takes the tokenizer a millisecond or two
THREADS = 2


class Workers:
    """Reads bodies: short ones at once, others in a thread.

    The tokenizer leaves Python's lock alone meanwhile.
    """

    def __init__(self):
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="bodies")

    async def run(self, size: int, do: Callable[..., T], *given) -> T:
        """`do(*given)`, for a body of so many bytes."""
        if size <= SHORT_BYTES:
            return do(*given)
        return await asyncio.get_running_loop().run_in_executor(self._pool, do, *given)
