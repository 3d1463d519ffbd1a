"""A line for each request, with what it took and no word of it."""

import json
import time
from pathlib import Path

from moe_edge.schedule.request import Request
from moe_edge.serve.errors import report
from moe_edge.serve.observers import Observer


class RequestLog(Observer):
    """Appends to a file; a line is there when its request is over.

    Raises:
      OSError: the file cannot be written; `close` only says so.
    """

    def __init__(self, path: str | Path):
        self._file = Path(path).open("a", encoding="utf-8", buffering=1)

    def ended(self, endpoint: str, row: Request) -> None:
        self._write(
            endpoint=endpoint,
            outcome=row.state,
            ended_by=row.ended_by,
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached_tokens,
            new_tokens=row.made,
            floor=row.floor,
            k_min=row.k_least,
            k_max=row.k_most,
            queue_ms=_ms(row.arrival_s, row.admitted_s),
            ttft_ms=_ms(row.arrival_s, row.first_s),
            e2e_ms=_ms(row.arrival_s, row.last_s),
        )

    def refused(self, endpoint: str, count: int) -> None:
        self._write(endpoint=endpoint, outcome="refused", count=count)

    def _write(self, **line) -> None:
        self._file.write(json.dumps({"time": round(time.time(), 3)} | line) + "\n")

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # the server ends as it would
            report(error)


def _ms(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round(1e3 * (end_s - start_s), 3)
