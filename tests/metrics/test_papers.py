"""Every figure and table of the papers is covered or excused; README says what entries
say."""

import json
import re
from pathlib import Path

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics import papers
from moe_edge.metrics.page import denominator
from moe_edge.metrics.papers import PAGES, by_paper, read_items, up_to_date, verdict_of
from moe_edge.metrics.ranged import NO_DIFFERENCE
from moe_edge.metrics.schema import ROWS_VERSION

ROOT = Path(__file__).parents[2]
# Figures and tables of each paper, numbered from 1.
SHOWN = {
    "smoe": (18, 4),
    "moe_prism": (12, 3),
    "prism": (8, 2),
    "od_moe": (10, 2),
    "coserve": (19, 1),
}
NUMBER = re.compile(r"\d+(?:,\d{3})+|\d*\.?\d+")


@pytest.mark.parametrize("paper", SHOWN)
def test_every_figure_and_table_is_covered_or_excused(paper):
    kinds = zip(("fig", "table"), SHOWN[paper], strict=True)
    expected = {f"{paper}/{kind}{n + 1}" for kind, count in kinds for n in range(count)}
    found = by_paper(read_items(ROOT))
    assert found.keys() == SHOWN.keys()
    assert {item["id"] for item in found[paper]} == expected


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_up_to_date(page):
    """`python -m moe_edge.metrics.report` writes them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- papers " in text and up_to_date(text, ROOT) == text


def numbers_in(text: str) -> list[tuple[float, int]]:
    """Without signs and thousands' commas, each with its decimals."""
    found = [number.replace(",", "") for number in NUMBER.findall(text)]
    return [(float(number), len(number.partition(".")[2])) for number in found]


def readme_rows() -> list[list[str]]:
    """Rows of README's tables that link an entry."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    return [row.split(" | ") for row in rows if "](results/" in row]


def not_in_entry(ours: str, entry: str) -> list[float]:
    """Numbers that are no rounded one of the entry's page, there also as a share."""
    page = (ROOT / "results" / entry / "README.md").read_text(encoding="utf-8")
    known = [number for number, _ in numbers_in(page)]
    return [
        number
        for number, decimals in numbers_in(ours)
        if not any(
            abs(scale * each - number) <= 0.5001 * 10**-decimals
            for each in known
            for scale in (1, 100)
        )
    ]


def test_numbers_of_ours_in_readme_are_those_of_their_entries():
    rows = readme_rows()
    assert len(rows) > 15
    for row in rows:
        (entry,) = re.findall(r"\]\(results/(\w+)/README.md\)", row[-1])
        assert not_in_entry(row[1], entry) == [], row
        page = (ROOT / "results" / entry / "README.md").read_text(encoding="utf-8")
        assert NO_DIFFERENCE not in row[1] or NO_DIFFERENCE in page, row
    assert not_in_entry("-10 / 123456 %, .123", "smoe_fig11") == [123456, 0.123]
    assert numbers_in(".5-0.50 and 1,060") == [(0.5, 1), (0.5, 2), (1060, 0)]


# Measured in seconds or rates, with no ratio of speeds in their answers.
NO_RATIO = {
    *("coserve_fig1", "coserve_fig5", "coserve_fig17_live", "coserve_fig19"),
    *("default_shapes", "planner_errors", "prism_fig5_live", "smoe_fig3", "smoe_fig12"),
}
SPEEDS = {"ms", "s", "tokens/s", "requests/s"}


def test_every_speed_entry_names_its_denominator():
    told = 0
    for path in sorted((ROOT / "results").glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["schema_version"] != ROWS_VERSION or result["kind"] == "simulated":
            continue
        units = {
            u for each in result["frames"].values() for u in each["units"].values()
        }
        page = (path.parent / "README.md").read_text(encoding="utf-8")
        found = re.findall(
            r"^- Denominator: .+; all weights are [\d.]+ MB in", page, re.M
        )
        expected = bool(units & SPEEDS) and path.parent.name not in NO_RATIO
        assert len(found) == expected, path.parent.name
        told += expected
    assert told > 12


def test_a_denominator_counts_its_bytes():
    line = denominator("FIFO", {"params": {"a": 1_000_000, "b": 500_000}}, "bfloat16")
    assert line == "- Denominator: FIFO; all weights are 3 MB in bfloat16."
    assert "6 MB in float32" in denominator("x", {"params": 0}, "float32", 1_500_000)


@pytest.fixture
def root(tmp_path):
    """A results folder with an entry `e`, and a paper's room."""
    entry = ROOT / "results" / "coserve_fig11"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "e").symlink_to(entry)
    room = tmp_path / "moe_edge" / "papers" / "p"
    room.mkdir(parents=True)
    (room / "README.md").write_text("# The paper\n")
    return tmp_path


def write(root, **changes):
    said = {"e": {"verdict": "partly", "why": "Small | tiny."}}
    item = {"id": "p/fig3", "title": "Speed", "paper": "2 times", "excuse": None}
    items = [item | {"entries": said} | changes]
    items.append(items[0] | {"id": "p/table1", "excuse": "A list.", "entries": {}})
    (root / "results" / "papers.json").write_text(json.dumps(items))


def test_a_table_tells_item_paper_ours_kind_verdict_why_and_command(root):
    write(root)
    text = up_to_date("a\n<!-- papers all -->\nold\n<!-- end -->\nb", root)
    assert text.startswith("a\n<!-- papers all -->\n\n## The paper\n\n| item | paper |")
    (row,) = [line for line in text.splitlines() if line.startswith("| fig.")]
    assert row.startswith("| fig. 3: Speed | 2 times | [e](../results/e/README.md): Of")
    assert "| computed | partly | Small \\| tiny. | `python launch/study.py " in row
    assert "Without an entry: table 1: Speed. A list." in text and "old" not in text
    text = up_to_date("<!-- papers verdicts -->\n<!-- end -->", root)
    assert "| The paper | 0 | 1 | 0 | 0 | 1 |" in text


def test_what_ran_decides_before_what_is_computed(tmp_path, monkeypatch):
    kinds = {"ran": "emulated", "computed": "simulated"}
    monkeypatch.setattr(papers, "read_result", lambda f: {"kind": kinds[f.name]})
    said = {"ran": {"verdict": "partly"}, "computed": {"verdict": "reproduced"}}
    assert verdict_of(tmp_path, {"entries": said}) == "partly"
    del said["ran"]
    assert verdict_of(tmp_path, {"entries": said}) == "reproduced"
    assert verdict_of(tmp_path, {"entries": {}}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "p/table1"}, "item p/table1 has keys .* and stands there 2 times"),
        ({"more": 1}, r"item p/fig3 has keys \['entries', 'excuse', 'id', 'more'"),
        ({"excuse": "Both."}, "item p/fig3 needs either an excuse or entries"),
        ({"entries": {}}, "item p/fig3 needs either an excuse or entries"),
        (
            {"entries": {"e": {"verdict": "great", "why": ""}}},
            "unknown verdict of p/fig3 'great'; known: not reproduced, partly",
        ),
        (
            {"entries": {"x": {"verdict": "partly", "why": ""}}},
            "item p/fig3 names entry x, which is not in results/",
        ),
    ],
)
def test_wrong_items_are_refused(root, changes, message):
    write(root, **changes)
    with pytest.raises(ConfigError, match=message):
        read_items(root)


def test_a_table_that_does_not_exist_is_refused(root):
    write(root)
    with pytest.raises(ConfigError, match="unknown table of papers 'most'"):
        up_to_date("<!-- papers most -->\n<!-- end -->", root)
