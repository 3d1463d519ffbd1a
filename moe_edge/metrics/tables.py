"""Rows of metrics as a few wide Markdown tables that fit a page.

A metric's name is `measure, setting, setting ...`. Every measure (with its unit) is
laid out in few rows; measures over the same rows stand side by side; what is too long
keeps the rows that hold a column's least or largest value.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLUMNS = 8  # at most, without the label
LEAST_ROWS = 6  # a table is left out rather than cut to fewer
FRAME = 5  # lines of a table that are no rows: caption, header, blank lines
# A server of several, in settings of its own, is part of what was measured.
MEASURE = re.compile(r"([^,]*(?:, server \d+(?=, ))?)(?:, )?(.*)", re.DOTALL)
REMARK = re.compile(r" \([^)]*\)$")  # of a setting that others name without it
JOINED = ""  # title of a table of several measures
RATIO = "ours / peer"  # a benchmark's policy that relates two others
SIDES = ("ours", RATIO, "limit_fraction", "peak_rss_bytes")  # all others: peers

Row = Mapping[str, Any]
Named = list[tuple[str, str, Row]]  # policy, setting, metric


def text_of(value: Any) -> str:
    """A number with four digits, anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def unit_of(row: Row) -> str:
    """The unit as it is shown: MB for bytes, nothing for a plain ratio."""
    return {"bytes": "MB", "1": ""}.get(row["unit"], row["unit"])


def cell(row: Row) -> str:
    """A metric's value with its spread."""
    scale = 1e-6 if row["unit"] == "bytes" else 1
    text = text_of(scale * row["value"])
    if row["spread"]["kind"] != "none":
        text += f" ± {scale * row['spread']['value']:.2g}"
    return text


@dataclasses.dataclass
class Table:
    """Cells by (row label, column label), both in order of appearance.

    `by_rows`: several measures were joined, each in rows of its own.
    """

    title: str
    unit: str
    label: str
    cells: dict[tuple[str, str], Row]
    by_rows: bool = False

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def full(self) -> float:
        """Share of cells that there are."""
        return len(self.cells) / (len(self.rows) * len(self.columns))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for _, column in self.cells))

    def telling(self, count: int) -> list[str]:
        """`count` row labels: a column's least and largest first, then from the top."""
        rows, found = self.rows, {}
        if len(rows) <= count:
            return rows
        for column in self.columns:
            known = [row for row in rows if (row, column) in self.cells]
            values = [self.cells[row, column]["value"] for row in known]
            for extreme in (min(values), max(values)):
                found[known[values.index(extreme)]] = None
        chosen = [*found, *(row for row in rows if row not in found)][:count]
        return [row for row in rows if row in chosen]

    def lines(self, count: int) -> list[str]:
        """Markdown with at most `count` rows."""
        shown, columns = self.telling(count), self.columns
        notes = [self.unit] if self.unit else []
        kinds = {row["spread"]["kind"] for row in self.cells.values()} - {"none"}
        notes += [f"± {kind}" for kind in sorted(kinds)]
        counts = {row["n"] for row in self.cells.values()}
        notes += [f"n = {counts.pop()}"] if len(counts) == 1 else []
        if len(shown) < len(self.rows):
            notes.append(f"{len(shown)} of {len(self.rows)} rows; all: `result.json`")
        head = [self.label, *(column or self.title for column in columns)]
        body = [
            [row or "all", *(self._text(row, column) for column in columns)]
            for row in shown
        ]
        caption = "; ".join(notes)
        if self.title != JOINED:
            caption = f"**{self.title}**" + (f" ({caption})" if caption else "")
        listed = [head, ["---"] * len(head), *body]
        listed = [[text.replace("|", "\\|") for text in line] for line in listed]
        return [caption, "", *(f"| {' | '.join(line)} |" for line in listed), ""]

    def _text(self, row: str, column: str) -> str:
        found = self.cells.get((row, column))
        return "-" if found is None else cell(found)


def layouts(rows: Named) -> Iterable[tuple[str, dict, int]]:
    """Label of the rows, cells, and how many rows a layout must save to be taken."""
    yield "what ran", {(policy, setting): row for policy, setting, row in rows}, 0
    if len({setting for _, setting, _ in rows}) == 1:
        return
    yield "setting", {(setting, policy): row for policy, setting, row in rows}, 1
    one_policy = len({policy for policy, _, _ in rows}) == 1

    def joined(policy: str, part: str) -> str:
        return ", ".join(filter(None, (part,) if one_policy else (policy, part)))

    for split in (_last_part, _first_part):
        parts = [(policy, *split(setting), row) for policy, setting, row in rows]
        across = {(rest, joined(p, part)): row for p, part, rest, row in parts}
        yield "setting", across, 4
        yield "setting", {(joined(p, r), part): row for p, part, r, row in parts}, 4


def _last_part(setting: str) -> tuple[str, str]:
    rest, _, part = setting.rpartition(", ")
    return part, rest


def _first_part(setting: str) -> tuple[str, str]:
    part, _, rest = setting.partition(", ")
    return part, rest


def table_of(title: str, rows: Named) -> Table:
    """The layout with the fewest rows among those that are not too wide or empty."""
    settings = {setting for _, setting, _ in rows}
    short = {one: REMARK.sub("", one) for one in settings}
    rows = [(p, short[s] if short[s] in settings else s, row) for p, s, row in rows]
    best, least = None, 0
    for label, cells, price in layouts(rows):
        table = Table(title, unit_of(rows[0][2]), label, cells)
        height = len(table.rows) + price
        fits = len(table.columns) <= COLUMNS and len(cells) == len(rows)
        if fits and table.full >= 0.5 and (best is None or height < least):
            best, least = table, height
    if best is None:  # one row each
        cells = {(", ".join(filter(None, (p, s))), ""): row for p, s, row in rows}
        best = Table(title, unit_of(rows[0][2]), "what ran", cells)
    return best


def side_by_side(tables: Iterable[Table]) -> list[Table]:
    """Joins narrow tables over the same rows, and tables of one row over the same
    columns: one column or row a measure.
    """
    found: list[Table] = []
    for table in tables:
        for other in found:
            if other.label != table.label:
                continue
            width = len(other.columns) + len(table.columns)
            narrow = len(table.columns) <= 2 and width <= COLUMNS
            single = len(other.rows) == len(table.rows) == 1 < len(table.columns)
            if narrow and _alike(other.rows, table.rows) and not other.by_rows:
                other.cells = _named(other) | _named(table)
            elif (single or other.by_rows and len(table.rows) == 1) and _alike(
                other.columns, table.columns
            ):
                other.cells = _named(other, True) | _named(table, True)
                other.by_rows = True
            else:
                continue
            other.title, other.unit = JOINED, ""
            break
        else:
            found.append(table)
    return found


def _alike(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether at least half of all labels are in both."""
    return len(set(some) & set(others)) >= len(set(some) | set(others)) / 2


def _named(table: Table, by_rows: bool = False) -> dict[tuple[str, str], Row]:
    """Cells whose column (or row) labels say measure and unit."""
    if table.title == JOINED:
        return table.cells
    unit = f" ({table.unit})" if table.unit else ""

    def named(label: str) -> str:
        return f"{table.title}{', ' if label else ''}{label}{unit}"

    return {
        (named(row), column) if by_rows else (row, named(column)): value
        for (row, column), value in table.cells.items()
    }


def benchmark_tables(metrics: Sequence[Row]) -> list[Table]:
    """Cases: ours, the peer and their ratio; those without a peer by their parts."""
    compared = {row["name"] for row in metrics if row["policy"] == RATIO}
    peers = {row["policy"] for row in metrics} - set(SIDES)
    named = {"peak_rss_bytes": "peak memory, MB", "limit_fraction": "of the limit"}
    cells: dict[tuple[str, str], Row] = {}
    rest = []
    for row in metrics:
        if row["name"] not in compared:
            rest.append(row)
            continue
        column = named.get(row["policy"], row["policy"])
        if row["policy"] in peers and len(peers) > 2:
            column = "peer"
        cells[_case(row, compared, metrics), column] = row
    tables = [Table("Ours and the peer, per case", "", "case", cells)] if cells else []
    groups: dict[tuple[str, str], Named] = {}
    for row in rest:
        family, _, case = row["name"].rpartition("/")
        what, _, setting = case.partition(" ")
        key = (family or row["policy"], row["unit"])
        groups.setdefault(key, []).append((what, setting, row))
    return tables + side_by_side(table_of(key[0], rows) for key, rows in groups.items())


def _case(row: Row, compared: set[str], metrics: Sequence[Row]) -> str:
    """A case's name with its unit, and with its peer where there are many."""
    of_case = [one for one in metrics if one["name"] == row["name"]]
    unit = next(unit_of(one) for one in of_case if one["policy"] == "ours")
    peers = [one["policy"] for one in of_case if one["policy"] not in SIDES]
    many = len({one["policy"] for one in metrics} - set(SIDES)) > 2
    against = f", against {peers[0]}" if many and peers else ""
    return f"{row['name']} ({unit}){against}"


def all_tables(metrics: Sequence[Row]) -> list[Table]:
    """Every metric in a table, in order of appearance."""
    if any(row["policy"] == RATIO for row in metrics):
        return benchmark_tables(metrics)
    groups: dict[tuple[str, str], Named] = {}
    for row in metrics:
        measure, setting = MEASURE.fullmatch(row["name"]).groups()
        named = row["policy"], setting, row
        groups.setdefault((measure, row["unit"]), []).append(named)
    tables = [table_of(measure, rows) for (measure, _), rows in groups.items()]
    return side_by_side(sorted(tables, key=lambda table: ", server " in table.title))


def tables_of(metrics: Sequence[Row], lines: int) -> list[str]:
    """Markdown of all metrics in about so many lines.

    Args:
      metrics: rows made by `results.metric`.
      lines: to be used; long tables are cut to it, then the last ones left out.
    """
    tables = all_tables(metrics)
    heights = [len(table.rows) for table in tables]

    def total(count: int, rows: int) -> int:
        return sum(FRAME + min(height, rows) for height in heights[:count])

    count = len(tables)
    while count > 1 and total(count, LEAST_ROWS) > lines:
        count -= 1
    rows = max(heights[:count], default=0)
    while rows > LEAST_ROWS and total(count, rows) > lines:
        rows -= 1
    found = [line for table in tables[:count] for line in table.lines(rows)]
    left = dict.fromkeys(c for t in tables[count:] for c in _measures(t))
    if left:
        found += [f"Also in `result.json`: {'; '.join(left)}.", ""]
    return found


def _measures(table: Table) -> list[str]:
    """What a table that is left out measures."""
    joined = table.rows if table.by_rows else table.columns
    return joined if table.title == JOINED else [table.title]
