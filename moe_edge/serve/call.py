"""Rows that an HTTP request asked for, as the event loop sees them."""

import asyncio
from collections.abc import Sequence

from moe_edge.schedule.request import Request
from moe_edge.serve.errors import ApiError

_REASONS = {
    "loading": "the model is being loaded; try again",
    "draining": "the server is about to end; ask another one",
    "engine_failed": "the engine failed and the server is about to end",
    "engine_error": "a step of the engine failed; the request may be sent again",
    "queue_full": "too many requests are waiting; try again later",
    "deadline_exceeded": "the request's time was over before it began",
}


def refusal(code: str) -> ApiError:
    """Why a request was not taken on, or not carried through."""
    return ApiError(code, _REASONS[code])


class Call:
    """Rows that were asked for together.

    Attributes:
      num_left: rows that are not over.
      lost: why there will be no end (code of an error); None: there will be one.
    """

    def __init__(
        self,
        rows: Sequence[Request],
        endpoint: str,
        arrival_s: float,
        with_tokens: bool = True,
    ):
        self.rows, self.endpoint = tuple(rows), endpoint
        self.arrival_s, self.with_tokens = arrival_s, with_tokens
        self.lost: str | None = None
        self.num_left = len(self.rows)
        self._news: dict[int, bool] = {}  # row -> whether it is over
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether every row has ended and all its news were read, or all is lost."""
        return self.lost is not None or not (self.num_left or self._news)

    @property
    def has_begun(self) -> bool:
        """Whether a step ran, or will at once, for any of its rows."""
        return any(row.admitted_s is not None for row in self.rows)

    async def news(self) -> dict[int, bool]:
        """Waits until rows have new tokens or are over: row -> whether it is over.

        Empty if the call is lost. News that are not read are not kept apart.
        """
        while not self._news and not self.is_over:
            self._changed.clear()
            await self._changed.wait()
        found, self._news = self._news, {}
        return found

    def tell(self, index: int, is_over: bool) -> None:
        """A row has news."""
        self.num_left -= is_over
        self._news[index] = is_over
        self._changed.set()

    def lose(self, code: str) -> None:
        """There will be no more news, unless all were there already."""
        if self.num_left:
            self.lost = self.lost or code
        self._changed.set()


def settle(answer: asyncio.Future, found, error: Exception | None) -> None:
    """Gives a question its answer, if somebody still waits for it."""
    if answer.cancelled():
        return
    if error is None:
        answer.set_result(found)
    else:
        answer.set_exception(error)
