"""A study's page from its template, `NAME.md` beside the study, and its stored rows.

The template is Markdown with Jinja's fields: numbers by name, frames as lists of rows,
`table(...)` and `figure(...)`. So a page says nothing that its rows do not, and a
sentence that orders things stands under `{% if %}` or names what a number found.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from moe_edge.core.tables import PACKAGE, plugins
from moe_edge.metrics.filters import (
    Line,
    alike,
    bounds_of,
    level,
    one,
    ranged,
    say,
    span,
    where,
)
from moe_edge.metrics.frames import N, plain, tables
from moe_edge.metrics.plots_panels import Panel, bounded, draw_panels
from moe_edge.metrics.ranged import Ranged, formatted, with_intervals
from moe_edge.metrics.tables import text_of

SHARED = PACKAGE / "bench" / "pages"  # parts of many pages
TABLE_ROWS = 12


def template_path(study: str) -> Path:
    """Where the study's template lies; its module is not imported."""
    module, _, _ = plugins("study")[study].partition(":")
    return PACKAGE.parent.joinpath(*module.split(".")[:-1]) / f"{study}.md"


def question_of(study: str) -> str:
    """The title of the study's page."""
    with template_path(study).open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()


def label_of(row: Line, keys: Sequence[str]) -> str:
    """What a row is of, in words."""
    parts = (
        str(row[key]) if isinstance(row[key], str) else f"{key} {text_of(row[key])}"
        for key in keys
        if row.get(key) not in (None, "")
    )
    return ", ".join(parts)


def words(keys: str | Sequence[str]) -> list[str]:
    """Names from `a b`, or a list of them."""
    return keys.split() if isinstance(keys, str) else list(keys)


def cell(row: Line, measure: str, digits: str = "", scale: float = 1) -> str:
    """A measure with half of what lies between its bounds; a text as it is."""
    value = row.get(measure)
    if value is None or isinstance(value, str):
        return value or ""
    low, high = (scale * bound for bound in bounds_of(row, measure))
    width, value = (high - low) / 2, value if scale == 1 else scale * value
    if digits[:1] in ("+", "x") and width and not isinstance(value, Ranged):
        value = Ranged(value, low, high)
    text = formatted(value, digits) if digits else ""
    if not text or re.search(r"\de", text):  # 1e+03
        text = text_of(value)
    return f"{text} ± {width:.2g}" if width and row[measure + N] > 1 else text


def markdown(
    rows: Sequence[Line],
    index: str,
    values: Mapping[str, str | tuple[str, float]],
    columns: str = "",
    digits: str = "",
) -> str:
    """A table of at most 12 rows.

    Args:
      rows: of a frame or of a number that is a list.
      index: keys that name its rows.
      values: measure -> how its column is called, and what it is multiplied by if
        that is not 1.
      columns: keys whose values stand beside each other.
      digits: format of the numbers.
    """
    names, beside = words(index), words(columns)
    called = {m: c if isinstance(c, tuple) else (c, 1) for m, c in values.items()}
    heads = dict.fromkeys(head for head, _ in called.values())
    if len(heads) < len(values):
        raise ValueError(f"columns of a table are called {list(called.values())}")
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        line = cells.setdefault(label_of(row, names), {})
        for measure, (head, scale) in called.items():
            parts = [head if len(values) > 1 or not beside else ""]
            text = cell(row, measure, digits, scale)
            if text:
                place = ", ".join(filter(None, [*parts, label_of(row, beside)]))
                line[place] = text
    if len(cells) > TABLE_ROWS:
        raise ValueError(f"a table of {len(cells)} rows, expected {TABLE_ROWS} at most")
    heads = list(dict.fromkeys(head for line in cells.values() for head in line))
    first = "" if len(values) > 1 or not beside else next(iter(called.values()))[0]
    listed = [[first, *heads], ["---"] * (1 + len(heads))]
    listed += [
        [label, *(line.get(head, "-") for head in heads)]
        for label, line in cells.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in listed)


WIDTHS = {"float32": 4, "bfloat16": 2}  # bytes of a weight


def denominator(
    what: str, model: Mapping[str, Any], form: str, params: int | None = None
) -> str:
    """What an entry's ratios of speed are over: the engine, its format and its bytes.

    Args:
      what: engine and policy.
      model: of the entry.
      form: of WIDTHS, in which the weights are kept.
      params: those of the model, where the entry has none.
    """
    found = params or model["params"]
    count = sum(found.values()) if isinstance(found, Mapping) else found
    size = WIDTHS[form] * count / 1e6
    return f"- Denominator: {what}; all weights are {size:.3g} MB in {form}."


@dataclasses.dataclass
class Figures:
    """Pictures that a template asks for.

    Attributes:
      drawn: file -> panels and options of `draw_panels`.
    """

    question: str
    drawn: dict[str, tuple[list[Panel], dict[str, Any]]] = dataclasses.field(
        default_factory=dict
    )

    def add(
        self,
        rows: Sequence[Line],
        x: str,
        y: Mapping[str, str],
        series: str,
        title: str,
        *,
        panels: str = "",
        x_label: str = "",
        level: Mapping[str, Any] | None = None,
        log: bool | str = False,
        log_x: bool = False,
        columns: int | None = None,
        file: str = "plot.png",
    ) -> str:
        """Panels of measures `y` over the key `x`; the picture's line in Markdown.

        Args:
          y: measure -> label of its axis.
          series: keys that name lines or bars.
          panels: keys that name panels; every measure has a panel for each.
          level: measure -> rows with the level to compare with, and its label.
          log: for all measures, or for the one named.
          columns: panels side by side; further calls for a file add panels.
        """
        groups = list(dict.fromkeys(label_of(row, words(panels)) for row in rows))
        is_more = file in self.drawn
        made, options = self.drawn.setdefault(file, ([], {"title": title}))
        for measure, y_label in y.items():
            for group in groups:
                some = [
                    row
                    for row in rows
                    if label_of(row, words(panels)) == group and measure in row
                ]
                if not some:
                    continue
                made.append(
                    _panel(some, x, measure, series, group, y_label)
                    | {"x_label": x_label, "log": log in (True, measure)}
                    | {"log_x": log_x, "level": _level(level, measure, group, panels)}
                )
        if columns or panels:
            options["columns"] = columns or len(groups)
        return "" if is_more else f"![{self.question}]({file})"

    def draw(self, folder: Path) -> None:
        """Draws all into a folder."""
        for file, (panels, options) in self.drawn.items():
            draw_panels(folder / file, [Panel(**one) for one in panels], **options)


def _level(level, measure: str, group: str, panels: str):
    if not level or measure not in level:
        return None
    label, rows, value = level[measure]
    found = [row for row in rows if label_of(row, words(panels)) == group]
    return (label, found[0][value]) if found else None


def _panel(some, x, measure, series, group, y_label) -> dict[str, Any]:
    xs = list(dict.fromkeys(row[x] for row in some))
    if not isinstance(xs[0], str):
        xs.sort()
    points = (
        (
            *(label_of(row, words(series)) or y_label, xs.index(row[x]), row[measure]),
            bounds_of(row, measure),
        )
        for row in some
    )
    return {"title": group or y_label, "y_label": y_label, "x": xs} | bounded(
        len(xs), points
    )


@functools.cache
def environment(folder: Path) -> jinja2.Environment:
    """Jinja for templates of a folder and the parts that all share."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, SHARED]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"where": where, "one": one, "say": say, "span": span}
    found.filters |= {"f": formatted, "ranged": ranged, "level": level}
    found.filters["alike"] = alike
    found.globals |= {"table": markdown, "denominator": denominator}
    return found


def render(study: str, result: Mapping[str, Any]) -> tuple[str, Figures]:
    """The text of the page but for how it was run, and its pictures.

    Raises:
      jinja2.UndefinedError: the template names what the entry has not.
    """
    path = template_path(study)
    figures = Figures(question_of(study))
    frames = {name: plain(found) for name, found in tables(result["frames"]).items()}
    facts = {key: result[key] for key in ("workload", "machine", "model")}
    template = environment(path.parent).get_template(path.name)
    started = result.get("starts", {"each": [], "intervals": {}})
    facts["starts"] = sum(start["used"] for start in started["each"])
    numbers = with_intervals(plain(result["numbers"]), started["intervals"])
    text = template.render(**frames, **numbers, **facts, figure=figures.add)
    return re.sub(r"\n{3,}", "\n\n", text), figures
