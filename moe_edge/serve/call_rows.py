"""Rows of open calls as the engine's thread knows them: whose each is, and its news."""

from moe_edge.core.checks import MoeEdgeError
from moe_edge.schedule.request import Request
from moe_edge.serve.call import Call
from moe_edge.serve.driver import Driver, Stepped
from moe_edge.serve.errors import report

News = dict[tuple[Call, int], bool]  # (call, row of it) -> whether it is over


class CallRows:
    """From rows of a driver to those of calls; of one thread.

    Attributes:
      is_urgent: whether there is news that should not wait for more: a first token, or
        an end.
    """

    def __init__(self):
        self._of: dict[Request, tuple[Call, int]] = {}
        self._news: News = {}
        self.is_urgent = False

    def begin(self, driver: Driver, call: Call) -> tuple[str, int] | None:
        """Submits all rows of a call; if one cannot begin, all leave.

        Returns:
          None, or (code of the error, rows that were not even submitted).
        """
        for index, row in enumerate(call.rows):
            try:
                driver.submit(row, call.arrival_s)
            except MoeEdgeError as error:  # whoever checked the request let it through
                report(error)
                code = "engine_error"
            else:
                self._of[row] = call, index
                if row.state != "refused":
                    continue
                code, index = "queue_full", index + 1
            self.leave(driver, call)
            return code, len(call.rows) - index
        return None

    def leave(self, driver: Driver, call: Call) -> None:
        """All rows of a call leave."""
        for index, row in enumerate(call.rows):
            if self._of.pop(row, None):
                driver.cancel(row)  # nothing, if it was refused
                self._news[call, index] = self.is_urgent = True

    def leave_all(self, driver: Driver) -> None:
        """All rows of all calls leave."""
        for call in {call for call, _ in self._of.values()}:
            self.leave(driver, call)

    def follow(self, stepped: Stepped) -> None:
        """Sorts a step's news by calls."""
        for row, *_ in stepped.tokens:
            found = self._of.get(row)
            if found is not None and found[0].with_tokens:
                self._news[found] = False
                self.is_urgent |= row.made == 1
        for row in stepped.ended:
            self._news[self._of.pop(row)] = self.is_urgent = True

    def take(self) -> News:
        """What is new since the last call."""
        news, self._news, self.is_urgent = self._news, {}, False
        return news
