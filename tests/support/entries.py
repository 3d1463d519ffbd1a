"""Rows of a results entry in frames, for tests."""

from typing import Any

from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Rows, plain, table, tables
from moe_edge.metrics.page import Figures, render


def rows_of(result: dict, frame: str, **keys: Any) -> list[dict[str, Any]]:
    """Rows of a frame whose keys have these values."""
    rows = plain(table(result["frames"][frame]))
    return [row for row in rows if all(row.get(k) == v for k, v in keys.items())]


def row_of(result: dict, frame: str, **keys: Any) -> dict[str, Any]:
    """The one row of a frame whose keys have these values."""
    (row,) = rows_of(result, frame, **keys)
    return row


def result_of(study: Study, rows: Rows) -> dict[str, Any]:
    """What a page is made of, from rows that a test filled in."""
    frames = rows.stored()
    numbers = plain(study.derive(tables(frames)))
    return {
        "frames": frames,
        "checks": numbers.pop("checks", {}) | rows.checks,
        "numbers": numbers,
        "workload": rows.about.get("workload", {}),
        "machine": {"backend": "cpu"},
        "model": {"name": "tiny", "params": 1000},
    }


def page_of(study: Study, result: dict[str, Any]) -> tuple[str, Figures]:
    """The page's text in one line a paragraph, and its pictures."""
    text, figures = render(study.name, result)
    return " ".join(text.split()), figures
