"""Files, folders and scripts that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
# Folders of the package may be named without `moe_edge/` in front.
BASES = (ROOT, ROOT / "moe_edge")


def missing_links(page: Path, text: str) -> list[str]:
    """Targets of [text](target) that are no file or folder."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [t for t in targets if not t.startswith(("http:", "https:"))]
    return [t for t in local if not (page.parent / t).exists()]


def missing_paths(text: str) -> list[str]:
    """Paths in `code` or in code blocks with one of our endings that do not exist."""
    names = re.findall(r"(?<![\w./~-])([A-Za-z][\w*-]*(?:/[\w*.-]+)+)", text)
    names = [name for name in names if re.search(r"\.(py|gin|md)$", name)]
    names = [name for name in names if "NAME" not in name]  # stands for any
    return [n for n in names if not any([*base.glob(n)] for base in BASES)]


def missing_scripts(text: str) -> list[str]:
    """Scripts and modules of `python X.py` and `python -m X` that do not exist."""
    scripts = re.findall(r"python (\S+\.py)", text)
    modules = re.findall(r"python -m ((?:launch|moe_edge)\.[\w.]*[a-z])", text)
    scripts += [module.replace(".", "/") + ".py" for module in modules]
    return [name for name in scripts if not (ROOT / name).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_names_what_exists(page):
    text = page.read_text(encoding="utf-8")
    assert missing_links(page, text) == []
    assert missing_scripts(text) == []
    assert missing_paths(text) == []


def test_missing_names_are_found():
    text = "[x](nowhere.md) `core/no.py::f` python launch/no.py python -m moe_edge.no"
    assert missing_links(ROOT / "README.md", text) == ["nowhere.md"]
    assert missing_paths(text) == ["core/no.py", "launch/no.py"]
    assert missing_scripts(text) == ["launch/no.py", "moe_edge/no.py"]


def test_readme_and_architecture_stay_short():
    lines = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    assert lines["README.md"] <= 150 and lines["architecture.md"] <= 200
