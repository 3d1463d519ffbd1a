"""Rows of open calls as the engine's thread knows them: whose each is, and its news."""

from moe_edge.core.checks import MoeEdgeError
from moe_edge.serve.call import Call
from moe_edge.serve.driver import Driver, Live, Stepped
from moe_edge.serve.errors import report

News = dict[tuple[Call, int], bool]  # (call, row of it) -> whether it is over


class CallRows:
    """From rows of a driver to those of calls; of one thread.

    Attributes:
      is_urgent: whether there is news that should not wait for more: a first token, or
        an end.
    """

    def __init__(self):
        self._of: dict[Live, tuple[Call, int]] = {}
        self._news: News = {}
        self._begun: set[Live] = set()  # rows that had news
        self.is_urgent = False

    def begin(self, driver: Driver, call: Call) -> tuple[str, int] | None:
        """Submits all rows of a call; if one cannot begin, all leave.

        Returns:
          None, or (code of the error, rows that were not even submitted).
        """
        for index, asked in enumerate(call.asked):
            try:
                live = driver.submit(asked, call.arrival_s)
            except MoeEdgeError as error:  # whoever checked the request let it through
                report(error)
                code = "engine_error"
            else:
                call.rows[index] = live
                self._of[live] = call, index
                if live.outcome is None:
                    continue
                code, index = "queue_full", index + 1
            self.leave(driver, call)
            return code, len(call.asked) - index
        return None

    def leave(self, driver: Driver, call: Call) -> None:
        """All rows of a call leave."""
        for index, live in enumerate(call.rows):
            if live is not None and self._of.pop(live, None):
                driver.cancel(live)  # nothing, if it was refused
                self._end(live, (call, index))

    def leave_all(self, driver: Driver) -> None:
        """All rows of all calls leave."""
        for call in {call for call, _ in self._of.values()}:
            self.leave(driver, call)

    def follow(self, stepped: Stepped) -> None:
        """Sorts a step's news by calls."""
        for live, *_ in stepped.tokens:
            found = self._of.get(live)
            if found is not None and found[0].with_tokens:
                self._news[found] = False
                self.is_urgent |= live not in self._begun
                self._begun.add(live)
        for live in stepped.ended:
            self._end(live, self._of.pop(live))

    def _end(self, live: Live, row: tuple[Call, int]) -> None:
        self._news[row] = self.is_urgent = True
        self._begun.discard(live)

    def take(self) -> News:
        """What is new since the last call."""
        news, self._news, self.is_urgent = self._news, {}, False
        return news
