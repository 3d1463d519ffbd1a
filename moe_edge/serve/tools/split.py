"""Calls of tools told apart from other text of a row, as it comes."""

from collections.abc import Mapping

from moe_edge.serve.markers import begun
from moe_edge.serve.tools.base import Dialect, Tool, ToolCall


class ToolSplit:
    """Text before the first call is said; a call is known when it is whole.

    What looks like calls and is none is text, and so is all that follows it.
    """

    def __init__(self, dialect: Dialect, tools: Mapping[str, Tool]):
        self._dialect, self._tools = dialect, tools
        self._held = ""  # may be part of the opening, or of calls
        self._within = False  # calls have begun
        self._is_text = False  # what began was no call
        self._opened = ""  # what stood before the first call

    def feed(self, text: str, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """(said, calls) of some more text.

        Args:
          is_last: no text follows: what is held is a call, or text.
        """
        self._held += text
        said, calls = "", []
        if not self._within and not self._is_text:
            said = self._before()
        if self._within:
            calls = self._calls(is_last)
        closed = ("", self._dialect.around[1])
        if is_last and self._within and not self._is_text:
            if self._opened or self._held.strip() not in closed:
                self._refuse()
        if self._is_text or (is_last and not self._within):
            said, self._held = said + self._held, ""
        return said, calls

    def _before(self) -> str:
        """What is said before calls begin."""
        held, opening = self._held, self._dialect.opening
        at = held.find(opening)
        if at >= 0:
            self._within = True
            end = at + len(self._dialect.around[0])
            self._opened, self._held = held[at:end], held[end:]
            return held[:at].rstrip()
        ready = len(held[: len(held) - begun(held, opening)].rstrip())
        self._held = held[ready:]
        return held[:ready]

    def _calls(self, is_last: bool) -> list[ToolCall]:
        """The calls that are whole by now."""
        dialect, calls = self._dialect, []
        while not self._is_text:
            rest = self._held.lstrip()
            if not rest.startswith(dialect.begin):
                may_come = dialect.begin.startswith(rest)
                closes = dialect.around[1]
                may_close = closes.startswith(rest) or rest.startswith(closes)
                if not (may_come or (closes and may_close)):
                    self._refuse()
                break
            body, found, more = dialect.split_end(rest[len(dialect.begin) :])
            if not found and not (is_last and not dialect.end):
                break
            call = dialect.read(body, self._tools)
            if call is None:
                self._refuse()
                break
            calls.append(call)
            self._opened = ""
            self._held = more if dialect.end else found + more
        return calls

    def _refuse(self) -> None:
        """What is held is no call."""
        self._is_text, self._held = True, self._opened + self._held
