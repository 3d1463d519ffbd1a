"""The site: its tutorial runs, its index lists all pages, generated parts are true."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_edge

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs/tutorial.ipynb"


@pytest.fixture(scope="module")
def generated():
    """docs/generated.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location(
        "generated", ROOT / "docs/generated.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(kind: str) -> list[dict]:
    notebook = json.loads(TUTORIAL.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_tutorial_is_committed_without_outputs():
    assert len(cells("code")) > 5
    for cell in cells("code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.slow
def test_tutorial_runs(tmp_path):
    """In a process of its own, as its reader runs it; the site's build runs it, too."""
    code = "\n".join("".join(cell["source"]) for cell in cells("code"))
    checks = [
        "assert own.tokens == ahead.tokens == out.tokens == reference.tokens",
        "assert out.stats['hit_ratio'] < ahead.stats['hit_ratio']",
        "assert len(table) == 7 and table['tokens_equal'].all()",
        "assert slow.stats['tpot_s'] > reference.stats['tpot_s']",
        "assert lossy['agreement'].between(0.5, 1).all()",
    ]
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join([code, *checks]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "compare.png").stat().st_size > 10_000


def test_every_page_is_in_the_index():
    listed = re.findall(r"```{toctree}\n(.*?)```", read("docs/index.md"), re.DOTALL)
    names = {line for part in listed for line in part.splitlines() if line}
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for kind in ("md", "ipynb")
        for path in (ROOT / "docs").rglob(f"*.{kind}")
    }
    assert pages - names == {"index"}
    text = read("docs/index.md")
    for path in ROOT.glob("moe_edge/papers/*/README.md"):
        assert f"<../{path.relative_to(ROOT).with_suffix('').as_posix()}>" in text


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_public_name_is_documented_once(generated):
    """On the page of the interface, or on that of plug-ins."""
    parts = [generated.public(kind) for kind in ("functions", "classes", "errors")]
    text = "\n".join([*parts, generated.plug_ins("")])
    found = re.findall(r"^\.\. auto\w+:: moe_edge\S*\.(\w+)$", text, re.MULTILINE)
    names = [getattr(moe_edge, name).__name__ for name in moe_edge.__all__]
    assert sorted(found) == sorted(names)
    page = read("docs/api.md") + read("docs/plug_ins.md")
    for asked in ("public functions", "public classes", "public errors", "plug_ins"):
        assert f"<!-- generated: {asked} -->" in page


def test_tables_of_entries_link_them(generated):
    table = generated.entries("smoe_")
    links = re.findall(r"\]\(/(results/\S+\.md)\)", table)
    assert len(links) >= 8
    assert all((ROOT / link).is_file() for link in links)
    with pytest.raises(ValueError, match="no entry that begins with x_"):
        generated.entries("x_")


def test_page_of_flags_is_what_help_prints(generated, monkeypatch):
    monkeypatch.setattr(generated.main, "names", lambda: ["replay"])
    text = generated.commands("")
    assert text.startswith("## replay\n\n```text\n")
    assert "\n  --slots_per_layer" in text and "dry_run" in text


def test_docstrings_are_shown_as_written(generated):
    def shown(*lines):
        kept = [*lines]
        generated.as_written(None, "class", "x", None, None, kept)
        return kept

    calls = [
        "",
        "    init   once",
        "           more",
        "",
        "    touch  later",
        "",
        "End.",
    ]
    assert shown("Calls", *calls) == ["Calls", "", "::", *calls]
    sections = ["Args:", "", "    x: one", "", "Text.", "", ">>> f()", "1"]
    assert shown(*sections) == sections
    assert shown("Args: as f.", "Yields:", "  x") == [
        *("Args: as f.", "", "Yields:", "  x")
    ]
    assert shown("Args:", "  x, **y: z") == ["Args:", r"  x, \*\*y: z"]


def test_pages_ask_for_parts_that_there_are(generated, monkeypatch):
    monkeypatch.setattr(generated.main, "names", lambda: ["replay"])
    asked = [
        match
        for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("moe_edge/papers/*/*.md")]
        for match in generated.ASKED.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(asked) >= 9
    for name, argument in asked:
        assert generated.PARTS[name](argument)
