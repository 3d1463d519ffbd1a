"""Rows of metrics as a few wide Markdown tables that fit a page.

A metric's name is `measure, setting, setting ...`. Every measure (with its unit) is
laid out in few rows; measures over the same rows stand side by side; what is too long
keeps the rows that the entry's text names and those that hold a column's least or
largest value.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

COLUMNS = 8  # at most, without the label
LEAST_ROWS = 6  # a table is left out rather than cut to fewer
FRAME = 5  # lines of a table that are no rows: caption, header, blank lines
# A server of several, in settings of its own, is part of what was measured.
MEASURE = re.compile(r"([^,]*(?:, server \d+(?=, ))?)(?:, )?(.*)", re.DOTALL)
REMARK = re.compile(r" \([^)]*\)$")  # of a setting that others name without it
JOINED = ""  # title of a table of several measures
RATIO = "ours / peer"  # a benchmark's policy that relates two others
SIDES = {  # policy of a benchmark -> its column; all others are peers
    "ours": "ours",
    RATIO: RATIO,
    "limit_fraction": "of the limit",
    "peak_rss_bytes": "peak memory, MB",
}

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


def cell(row: Row | None) -> str:
    """A metric's value with its spread."""
    if row is None:
        return "-"
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

    def telling(self, count: int, text: str) -> list[str]:
        """`count` row labels: what the text names first, then a column's least and
        largest, then from the top. Of those named, least and largest come first."""
        rows, extremes = self.rows, {}
        if len(rows) <= count:
            return rows
        for column in self.columns:
            known = [row for row in rows if (row, column) in self.cells]
            values = [self.cells[row, column]["value"] for row in known]
            for extreme in (min(values), max(values)):
                extremes[known[values.index(extreme)]] = None
        named = [row for row in rows if row and _names(text, row)]
        both = [row for row in extremes if row in named]
        chosen = [*dict.fromkeys([*both, *named, *extremes, *rows])][:count]
        return [row for row in rows if row in chosen]

    def lines(self, count: int, text: str) -> list[str]:
        """Markdown with at most `count` rows, those first that the text names."""
        shown, columns = self.telling(count, text), self.columns
        notes = [self.unit] if self.unit else []
        kinds = {row["spread"]["kind"] for row in self.cells.values()} - {"none"}
        notes += [f"± {kind}" for kind in sorted(kinds)]
        counts = {row["n"] for row in self.cells.values()}
        notes += [f"n = {counts.pop()}"] if len(counts) == 1 else []
        if len(shown) < len(self.rows):
            notes.append(f"{len(shown)} of {len(self.rows)} rows; all: `result.json`")
        head = [self.label, *(column or self.title for column in columns)]
        body = [
            [row or "all", *(cell(self.cells.get((row, c))) for c in columns)]
            for row in shown
        ]
        caption = "; ".join(notes)
        if self.title != JOINED:
            caption = f"**{self.title}**" + (f" ({caption})" if caption else "")
        listed = [head, ["---"] * len(head), *body]
        listed = [[text.replace("|", "\\|") for text in line] for line in listed]
        return [caption, "", *(f"| {' | '.join(line)} |" for line in listed), ""]

    def take(self, other: "Table") -> bool:
        """Takes another's cells as further columns or rows, if both fit together."""
        width = len(self.columns) + len(other.columns)
        narrow = len(other.columns) <= 2 and width <= COLUMNS and not self.by_rows
        single = self.by_rows or len(self.rows) == 1 < len(other.columns)
        if narrow and _alike(self.rows, other.rows):
            by_rows = False
        elif single and len(other.rows) == 1 and _alike(self.columns, other.columns):
            by_rows = True
        else:
            return False
        self.cells = self._named(by_rows) | other._named(by_rows)
        self.title, self.unit, self.by_rows = JOINED, "", by_rows
        return True

    def _named(self, by_rows: bool) -> dict[tuple[str, str], Row]:
        """Cells whose column (or row) labels say measure and unit."""
        if self.title == JOINED:
            return self.cells
        unit = f" ({self.unit})" if self.unit else ""

        def named(label: str) -> str:
            return f"{self.title}{', ' if label else ''}{label}{unit}"

        return {
            (named(row), column) if by_rows else (row, named(column)): value
            for (row, column), value in self.cells.items()
        }

    def measures(self) -> list[str]:
        """What is measured."""
        names = self.rows if self.by_rows else self.columns
        return names if self.title == JOINED else [self.title]


def joined(*parts: str) -> str:
    """The parts that there are, separated by commas."""
    return ", ".join(filter(None, parts))


def layouts(rows: Named) -> Iterator[tuple[str, int, list[tuple[str, str]]]]:
    """Label of the rows, how many rows a layout must save to be taken, and where each
    metric stands: (row, column)."""
    yield "what ran", 0, [(policy, setting) for policy, setting, _ in rows]
    if len({setting for _, setting, _ in rows}) == 1:
        return
    yield "setting", 1, [(setting, policy) for policy, setting, _ in rows]
    one_policy = len({policy for policy, _, _ in rows}) == 1
    for is_last in (True, False):
        across, down = [], []
        for policy, setting, _ in rows:
            who = "" if one_policy else policy
            split = setting.rpartition if is_last else setting.partition
            rest, part = split(", ")[:: 2 if is_last else -2]
            across.append((rest, joined(who, part)))
            down.append((joined(who, rest), part))
        yield "setting", 4, across
        yield "setting", 4, down


def table_of(title: str, rows: Named) -> Table:
    """The layout with the fewest rows among those that are not too wide or empty."""
    settings = {setting for _, setting, _ in rows}
    short = {one: REMARK.sub("", one) for one in settings}
    rows = [(p, short[s] if short[s] in settings else s, row) for p, s, row in rows]
    metrics, unit = [row for _, _, row in rows], unit_of(rows[0][2])
    best, least = None, math.inf
    for label, price, places in layouts(rows):
        table = Table(title, unit, label, dict(zip(places, metrics, strict=True)))
        fits = len(table.columns) <= COLUMNS and len(table.cells) == len(rows)
        if fits and table.full >= 0.5 and len(table.rows) + price < least:
            best, least = table, len(table.rows) + price
    if best is None:  # one row each
        cells = {(joined(policy, setting), ""): row for policy, setting, row in rows}
        best = Table(title, unit, "what ran", cells)
    return best


def side_by_side(tables: Iterable[Table]) -> list[Table]:
    """Joins narrow tables over the same rows, and tables of one row over the same
    columns: one column or row a measure.
    """
    found: list[Table] = []
    for table in tables:
        if not any(other.label == table.label and other.take(table) for other in found):
            found.append(table)
    return found


def _names(text: str, label: str) -> bool:
    """Whether the label stands in the text, not only as a part of a longer word."""
    alone = rf"(?<![\w.-]){re.escape(label)}(?![\w-]|\.\d|'s)"
    return re.search(alone, text) is not None


def _alike(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether at least half of all labels are in both."""
    return len(set(some) & set(others)) >= len(set(some) | set(others)) / 2


def benchmark_tables(metrics: Sequence[Row]) -> list[Table]:
    """Cases: ours, the peer and their ratio; those without a peer by their parts."""
    cases: dict[str, dict[str, Row]] = {}
    for row in metrics:
        cases.setdefault(row["name"], {})[row["policy"]] = row
    many = len({row["policy"] for row in metrics} - set(SIDES)) > 2
    cells: dict[tuple[str, str], Row] = {}
    groups: dict[tuple[str, str], Named] = {}
    for case, found in cases.items():
        peers = [policy for policy in found if policy not in SIDES]
        if RATIO in found:
            against = f", against {peers[0]}" if many and peers else ""
            label = f"{case} ({unit_of(found['ours'])}){against}"
            names = SIDES | dict.fromkeys(peers, "peer" if many else None)
            cells |= {(label, names[p] or p): row for p, row in found.items()}
            continue
        family, _, parts = case.rpartition("/")
        what, _, setting = parts.partition(" ")
        for policy, row in found.items():
            group = groups.setdefault((family or policy, row["unit"]), [])
            group.append((what, setting, row))
    tables = [Table("Ours and the peer, per case", "", "case", cells)] if cells else []
    return tables + side_by_side(table_of(key[0], rows) for key, rows in groups.items())


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


def tables_of(metrics: Sequence[Row], lines: int, text: str = "") -> list[str]:
    """Markdown of all metrics in about so many lines.

    Args:
      metrics: rows made by `results.metric`.
      lines: to be used; long tables are cut to it, then the last ones left out.
      text: rows that it names are kept in a cut table.
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
    over, found = max(0, lines - total(count, rows)), []
    for table, height in zip(tables[:count], heights, strict=False):
        more = min(over, max(0, height - rows))  # the first ones say most
        over -= more
        found += table.lines(rows + more, text)
    left = dict.fromkeys(c for t in tables[count:] for c in t.measures())
    if left:
        found += [f"Also in `result.json`: {'; '.join(left)}.", ""]
    return found
