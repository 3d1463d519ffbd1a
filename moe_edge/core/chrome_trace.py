"""What ran where and when, as a file that ui.perfetto.dev and chrome://tracing open."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.core.files import write_text

MICRO = 1e6  # the format counts microseconds


class Span(NamedTuple):
    """Something that takes time.

    Attributes:
      process: name of the group of tracks, such as a server.
      track: name of the line within it, such as a GPU.
      name: what ran.
      start_s, seconds: when, how long; 0 seconds is an instant.
      args: further facts, shown when the span is clicked.
    """

    process: str
    track: str
    name: str
    start_s: float
    seconds: float
    args: dict[str, Any] | None = None


def trace_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Spans in the Trace Event Format: a process a group, a thread a track.

    Spans of one track never overlap: what begins while another one runs goes to a
    further track of the same name, numbered from 2.
    """
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], list[int]] = {}  # of a track, and further ones
    free_s: list[float] = []  # when each thread's last span ends
    for span in sorted(spans, key=lambda span: span.start_s):
        process = processes.get(span.process)
        if process is None:
            process = processes[span.process] = len(processes)
            events.append(_named("process_name", process, 0, span.process))
        mine = threads.setdefault((span.process, span.track), [])
        thread = next((t for t in mine if free_s[t - 1] <= span.start_s), None)
        if thread is None:
            free_s.append(0.0)
            thread = len(free_s)
            mine.append(thread)
            label = span.track if len(mine) == 1 else f"{span.track} ({len(mine)})"
            events.append(_named("thread_name", process, thread, label))
        free_s[thread - 1] = span.start_s + span.seconds
        events.append(
            {
                "name": span.name,
                "ph": "X" if span.seconds else "i",
                "pid": process,
                "tid": thread,
                "ts": span.start_s * MICRO,
                **({"dur": span.seconds * MICRO} if span.seconds else {"s": "t"}),
                **({"args": span.args} if span.args else {}),
            }
        )
    return events


def write_chrome_trace(path: str | Path, spans: Iterable[Span]) -> None:
    """Writes spans as a Chrome trace (JSON)."""
    content = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}
    write_text(path, json.dumps(content))


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    ids = {"ph": "M", "pid": process, "tid": thread}
    return {"name": kind, **ids, "args": {"name": name}}
