"""The core knows no paper, and papers know none of each other."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_edge.commands import main
from moe_edge.commands.policy_tables import KINDS
from moe_edge.configurables import ROOTS
from moe_edge.core import tables
from tests.test_imports import ROOT, imported_modules, source_files

PAPERS = sorted(p.name for p in (ROOT / "moe_edge/papers").iterdir() if p.is_dir())
PAPERS = [name for name in PAPERS if not name.startswith("_")]
NAMED_KINDS = {*KINDS, "mode"}  # commands and studies are words of their own

# Where the core still says the name of a paper or of a plug-in of one. Only shrinks.
SAID = {
    # The mode, which is ours, has the paper's name; so has a preset of machines.
    ("cluster/modes.py", "prism"),
    ("cluster/prism_options.py", "prism"),
    ("hardware/clusters.py", "prism"),
    ("place/run_place.py", "prism"),
    ("simulate/cluster/build.py", "prism"),
    # What a predictor may need of an engine (`Predictor.companion`).
    ("engine/offload_options.py", "shadow"),
    ("engine/offloaded.py", "shadow"),
    ("predict/base.py", "shadow"),
    # The policy that cards have always been measured with.
    ("bench/fidelity/study.py", "smoe_score"),
}

# Tests outside a paper's that import one. Only shrinks.
TESTED = {
    "bench/test_prompts.py": {"smoe"},
    "conftest.py": {"od_moe"},  # where there is one
    "core/test_json_reader.py": {"coserve"},
    "evaluate/test_fidelity.py": {"smoe"},
    "launch/test_formats.py": {"coserve"},
    "test_public_face.py": {"smoe"},
}


def paper_of(path: Path) -> str | None:
    """The paper whose room, in the package or in tests, a file stands in."""
    parts = path.relative_to(ROOT).parts
    return parts[2] if parts[1] == "papers" and len(parts) > 3 else None


def papers_in(path: Path) -> set[str]:
    """The papers that a file imports something of."""
    parts = [name.split(".") for name in imported_modules(path)]
    return {p[2] for p in parts if p[1:2] == ["papers"] and len(p) > 2}


def rows(paper: str) -> tuple[tuple[str, str, str], ...]:
    return tables._rows(f"moe_edge.papers.{paper}")


def strings(path: Path) -> set[str]:
    """Texts in a file's code but for docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant))
    return {n.value for n in constants if type(n.value) is str and id(n) not in docs}


def test_papers_have_tables():
    assert len(PAPERS) == 5
    assert {f"moe_edge.papers.{name}" for name in PAPERS} <= {*tables.rooms()}


def test_papers_import_no_other_paper():
    found = {path: papers_in(path) - {paper_of(path)} for path in source_files()}
    found = {path.name: more for path, more in found.items() if paper_of(path) and more}
    assert found == {}


def test_core_says_no_name_of_a_paper():
    """Imports are held by the order (`test_imports`), lazy ones and strings are not."""
    names = {*PAPERS}
    for paper in PAPERS:
        names |= {name for kind, name, _ in rows(paper) if kind in NAMED_KINDS}
    found = set()
    for path in source_files():
        room, *_ = path.relative_to(ROOT / path.relative_to(ROOT).parts[0]).parts
        if path.is_relative_to(ROOT / "moe_edge") and room not in ("papers", "studies"):
            said = strings(path)
            where = path.relative_to(ROOT / "moe_edge").as_posix()
            found |= {(where, name) for name in names & said}
            assert not [text for text in said if "moe_edge.papers." in text], where
    assert found == SAID


def test_tests_of_the_core_use_no_paper():
    files = [p for p in (ROOT / "tests").rglob("*.py") if paper_of(p) is None]
    files = [p for p in files if p.relative_to(ROOT).parts[1] != "studies"]
    found = {p.relative_to(ROOT / "tests").as_posix(): papers_in(p) for p in files}
    assert {where: papers for where, papers in found.items() if papers} == TESTED


@pytest.mark.parametrize("paper", PAPERS)
def test_rows_of_a_table_name_what_there_is(paper):
    for kind, name, place in rows(paper):
        found = tables.load(f"moe_edge.papers.{paper}.{place}")
        if kind in KINDS:
            assert KINDS[kind][name] is found and found.name == name
        elif kind == "root":
            assert ROOTS[name].endswith(place) and callable(found)
        elif kind == "command":
            assert name in main.names() and callable(found)
        else:
            assert kind in ("mode", "study")  # these have tests of their own


def test_tables_are_read_without_what_they_name():
    code = (
        "import sys; from moe_edge.core import tables; tables.plugins('study')\n"
        "print(*sorted(m for m in sys.modules if 'moe_edge.' in m or m == 'jax'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    read = {*done.stdout.split()} - {"moe_edge.core", "moe_edge.core.tables"}
    rooms = {room for name in tables.rooms() for room in (name, f"{name}.plugins")}
    assert read == rooms | {"moe_edge.papers"}, done.stderr


def names_of_papers() -> set[str]:
    """All that a paper's table names, and papers."""
    return {*PAPERS} | {name for paper in PAPERS for _, name, _ in rows(paper)}


def without_papers(folder: Path) -> None:
    """Copies the repository without its papers.

    Gone are the rooms and the studies above them with their tests, configs and
    scripts, and the tests of the core that import a paper.
    """
    kept = ("moe_edge", "tests", "configs", "launch", "examples", "docs", "tools")
    unneeded = shutil.ignore_patterns("__pycache__", "papers", "studies")
    for name in kept:
        shutil.copytree(ROOT / name, folder / name, ignore=unneeded)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    names = names_of_papers()
    for config in (folder / "configs").rglob("*.gin"):
        if config.stem.startswith((*PAPERS, *names, "benchmark_", "default_")):
            config.unlink()
    for script in (folder / "launch").glob("*.py"):
        if script.stem in names:
            script.unlink()
    for where in (*TESTED, "test_papers.py"):
        if where != "conftest.py":
            (folder / "tests" / where).unlink()


@pytest.mark.slow
def test_the_core_stands_where_all_papers_are_deleted(tmp_path):
    """Every module imports, every test that is left is collected, and the tests of
    commands and policies pass that name nothing of a paper. Left out: the rest of the
    plain tests, which would take minutes, and pages of the documentation."""
    without_papers(tmp_path)
    modules = [
        ".".join(path.relative_to(tmp_path).with_suffix("").parts)
        for path in (tmp_path / "moe_edge").rglob("*.py")
    ]
    peers = ("moe_edge.evaluate.lm_eval", "moe_edge.evaluate.run_lm_eval")
    wanted = [name for name in modules if not name.startswith(peers)]
    code = f"import importlib\nfor name in {wanted}: importlib.import_module(name)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    run("-c", code)
    run("-m", "moe_edge.commands.policy_tables")  # the pages' lists become shorter
    pytest_flags = ("-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider")
    run(*pytest_flags, "--collect-only", "-m", "not parity", "tests")
    names, tests = names_of_papers(), tmp_path / "tests"
    quick = [
        str(path)
        for folder in ("commands", "offload", "place", "predict", "route", "schedule")
        for path in sorted((tests / folder).glob("test_*.py"))
        if not strings(path) & names
    ]
    assert len(quick) > 40
    run(*pytest_flags, *quick)
