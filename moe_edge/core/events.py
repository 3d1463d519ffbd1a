"""What happened in a run, and when: one record an event, JSON lines on disk."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from moe_edge.core.checks import check_known
from moe_edge.core.chrome_trace import Span, write_chrome_trace
from moe_edge.core.clock import WallClock
from moe_edge.core.files import write_text

KINDS = (
    *("route", "hit", "miss", "transfer", "evict", "compute", "wait", "call", "fail"),
)
CAUSES = ("demand", "prefetch", "migrate")


class Event(NamedTuple):
    """One event; a field that does not apply is None.

    Attributes:
      t_s: when it began, seconds from the start of the run.
      dur_s: how long it took; 0 for an instant.
      kind: one of KINDS.
      cause: one of CAUSES, or None.
      request, step, layer, expert, sub, server: whose event it is.
      bytes: payload moved.
    """

    t_s: float
    dur_s: float
    kind: str
    cause: str | None = None
    request: int | str | None = None
    step: int | None = None
    layer: int | None = None
    expert: int | None = None
    sub: int | None = None
    server: int | None = None
    bytes: int = 0


@dataclasses.dataclass
class Total:
    """Sum over the events of one (kind, cause)."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Recorder:
    """Collects events from any thread.

    One `list.append` an event, which Python makes atomic: no lock. Where even the
    arguments would cost, callers ask `enabled` first.

    Attributes:
      clock: the run's clock.
      enabled: whether `add` keeps anything.
    """

    def __init__(self, enabled: bool = True, clock: WallClock | None = None):
        self.clock = WallClock() if clock is None else clock
        self.enabled = enabled
        self._events: list[Event] = []

    def add(
        self,
        kind: str,
        t_s: float,
        dur_s: float = 0.0,
        cause: str | None = None,
        **fields,
    ) -> None:
        """Appends an event; `fields` are those of `Event` from `request` on."""
        if self.enabled:
            self._events.append(Event(t_s, dur_s, kind, cause, **fields))

    def events(self) -> list[Event]:
        """A copy of all events so far, in the order in which they were added."""
        return list(self._events)

    def clear(self) -> None:
        """Forgets all events, for example those of a warm-up."""
        self._events.clear()

    def write_jsonl(self, path: str | Path) -> None:
        """Writes one JSON object a line, ordered by `t_s`; atomically.

        Raises:
          ConfigError: an event of an unknown kind or cause. It is looked for here
            because `add` is called on hot paths.
        """
        write_events(path, self.events())

    def write_timeline(self, path: str | Path) -> None:
        """Writes a Chrome trace, a track each for compute, transfers and waits.

        What takes no time (routes, hits, misses) is marked on a track of its own.
        """
        write_chrome_trace(path, map(_span, self.events()))


def write_events(path: str | Path, events: Iterable[Event]) -> None:
    """As `Recorder.write_jsonl`."""
    events = sorted(events, key=lambda event: event.t_s)
    for event in events:
        check_known("event kind", event.kind, KINDS)
        if event.cause is not None:
            check_known("event cause", event.cause, CAUSES)
    lines = [json.dumps(event._asdict()) + "\n" for event in events]
    write_text(path, "".join(lines))


def _span(event: Event) -> Span:
    process = "engine" if event.server is None else f"server {event.server}"
    track = event.kind if event.dur_s else "routing"
    parts = [event.cause or event.kind]
    for field in ("layer", "expert", "sub"):
        value = getattr(event, field)
        if value is not None and (field, value) != ("sub", 0):
            parts.append(f"{field} {value}")
    known = {k: v for k, v in event._asdict().items() if v is not None}
    args = {k: known[k] for k in ("request", "step", "bytes") if known.get(k)}
    return Span(process, track, " ".join(parts), event.t_s, event.dur_s, args)
