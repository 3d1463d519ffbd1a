"""Files, folders and scripts that the documentation names exist."""

import re
from pathlib import Path

import pytest

from moe_edge.commands import main

ROOT = Path(__file__).parents[1]
_OURS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*_OURS, *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("moe_edge/papers/*/README.md"))
# Folders of the package may be named without `moe_edge/` in front.
BASES = (ROOT, ROOT / "moe_edge", ROOT / "docs")


def missing_links(page: Path, text: str) -> list[str]:
    """Targets of [text](target) that are no file or folder."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [t for t in targets if not t.startswith(("http:", "https:"))]
    return [t for t in local if not (page.parent / t).exists()]


def missing_paths(text: str, *rooms: Path) -> list[str]:
    """Paths in `code` or in code blocks with one of our endings that do not exist."""
    names = re.findall(r"(?<![\w./~-])([A-Za-z][\w*-]*(?:/[\w*.-]+)+)", text)
    names = [name for name in names if re.search(r"\.(py|gin|md|sh)$", name)]
    names = [name for name in names if "NAME" not in name]  # stands for any
    return [n for n in names if not any([*base.glob(n)] for base in (*BASES, *rooms))]


def missing_scripts(text: str) -> list[str]:
    """Scripts and modules of `python X.py`, `python -m X` and `moe-edge X` that do not
    exist."""
    scripts = re.findall(r"python (\S+\.py)", text)
    modules = re.findall(r"python -m ((?:launch|moe_edge)\.[\w.]*[a-z])", text)
    scripts += [module.replace(".", "/") + ".py" for module in modules]
    commands = re.findall(r"(?:^|`)moe-edge ([a-z]\w*)", text, re.MULTILINE)
    missing = [name for name in scripts if not (ROOT / name).is_file()]
    return missing + [name for name in commands if name not in main.names()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_what_exists(page):
    text = page.read_text(encoding="utf-8")
    assert missing_links(page, text) == []
    assert missing_scripts(text) == []
    assert missing_paths(text, page.parent) == []


def test_missing_names_are_found():
    text = "[x](nowhere.md) `core/no.py::f` python launch/no.py python -m moe_edge.no"
    text += " `moe-edge nay`"
    assert missing_links(ROOT / "README.md", text) == ["nowhere.md"]
    assert missing_paths(text) == ["core/no.py", "launch/no.py"]
    assert missing_scripts(text) == [*("launch/no.py", "moe_edge/no.py", "nay")]


def quotes(text: str) -> list[tuple[list[str], list[str]]]:
    """(entries linked, numbers) of each cell or paragraph that links entries.

    Numbers: those with decimals, and those before a per cent sign, in its range or in
    its list (`3 % less, 13 and 21 % more` has three); of a row whose last cell is a
    link, all behind the first cell that are no part of a name.
    """
    found = []
    for part in re.split(r"\n\n|\|\n|\n\|", text):
        *row, last = part.split(" | ")
        if row and re.fullmatch(r"\[[^\]]*\]\(\S+\)\s*", last):
            number = r"(?<![\w.])(?<![A-Za-z]-)(\d*\.?\d+)(?=x?(?:[^\w.]|\.(?!\d)|$))"
            cells = [" | ".join([*row[1:], last])]
        else:
            number = r"(?<![\w.])(\d*\.\d+|\d+(?=(?:(?:-|, |,? and )[+-]?\d+)* %))"
            cells = [*row, last]
        for cell in cells:
            names = re.findall(r"\]\(results/(\w+)/README\.md\)", cell)
            plain = re.sub(r"\[[^\]]*\]\([^)]*\)", "", no_commas(cell))
            found += [(names, re.findall(number, plain))] if names else []
    return found


def no_commas(text: str) -> str:
    """1,234 as 1234."""
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)


def not_in(numbers: list[str], page: str) -> list[str]:
    """Numbers that no number of a page rounds to."""
    known = [float(each) for each in re.findall(r"\d*\.\d+|\d+", no_commas(page))]
    missing = []
    for number in numbers:
        half = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
        if not any(abs(float(number) - each) <= half for each in known):
            missing.append(number)
    return missing


def test_readme_quotes_what_its_entries_say():
    found = quotes((ROOT / "README.md").read_text(encoding="utf-8"))
    assert sum(len(numbers) for _, numbers in found) > 50
    for names, numbers in found:
        pages = [ROOT / "results" / name / "README.md" for name in names]
        texts = [each.read_text(encoding="utf-8") for each in pages]
        page = " ".join(text.partition("## How it was run")[0] for text in texts)
        assert not_in(numbers, page) == [], names


def test_wrong_quotes_are_found():
    row = "| x | -54.5 % (paper 3-7, +8 %), .97: [a](results/a/README.md) | 99.9 |\n"
    assert quotes(row) == [(["a"], ["54.5", "3", "7", "8", ".97"])]
    assert quotes("3 % less, 13 and 21 % [a](results/a/README.md)")[0][1] == [
        *("3", "13", "21")
    ]
    row = "| batch 8 | q4_0 2,097 ms, -54.5, 21-37. | **1.2x**, 1.16ms"
    row += " | [a](results/a/README.md) |\n"
    assert quotes(row) == [(["a"], ["2097", "54.5", "21", "37", "1.2"])]
    assert not_in(["2097", "9"], "2,097 and 1,9") == []
    assert not_in(["54.5", "3", ".97", "8"], "54.53, 0.968 and 2.6") == ["8"]
