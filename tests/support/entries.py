"""Rows of a results entry in frames, for tests."""

from typing import Any

from moe_edge.metrics.frames import plain, table


def rows_of(result: dict, frame: str, **keys: Any) -> list[dict[str, Any]]:
    """Rows of a frame whose keys have these values."""
    rows = plain(table(result["frames"][frame]))
    return [row for row in rows if all(row.get(k) == v for k, v in keys.items())]


def row_of(result: dict, frame: str, **keys: Any) -> dict[str, Any]:
    """The one row of a frame whose keys have these values."""
    (row,) = rows_of(result, frame, **keys)
    return row
