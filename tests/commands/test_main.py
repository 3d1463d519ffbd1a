"""`moe-edge NAME` does what `python launch/NAME.py` does."""

import re
import sys
from pathlib import Path

import pytest

from moe_edge.commands import main

ROOT = Path(__file__).parents[2]
DRY = "--prompt", "a", "--dry_run"


def test_command_and_script_give_the_same(run_command, run_script, tiny):
    flags = "generate", "--checkpoint", tiny, *DRY, "--out_dir", "o"
    wanted = run_script(*flags).summary
    assert wanted["prompts"] == 1
    assert run_command(*flags).summary == wanted
    flags = "generate", "--promt", "x"
    assert run_command(*flags).error == run_script(*flags).error


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_list_has_a_line_for_each_command(run_command, arguments):
    done = run_command(*arguments)
    assert (done.code, done.stderr) == (0, "")
    lines = re.findall(r"^  (\w+) +(\S.*)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in lines] == main.names()
    assert all(text.endswith(".") for _, text in lines)
    assert dict(lines)["generate"] == "Continues prompts with a model."
    assert max(map(len, done.stdout.splitlines())) < 110


def test_every_command_has_its_script_and_main():
    scripts = sorted(path.stem for path in (ROOT / "launch").glob("[!_]*.py"))
    assert main.names() == scripts and len(scripts) > 20
    texts = {(ROOT / "launch" / f"{name}.py").read_text() for name in scripts}
    calls = {text.partition("\n\n")[2] for text in texts}
    assert len(calls) == 1  # a docstring and the same call
    for name in scripts:
        source = main.script(name).read_text()
        assert f"\nmoe-edge {name}" in source and "\ndef main() -> None:" in source


@pytest.mark.parametrize(
    "name, message",
    [
        ("genrate", "unknown command 'genrate'; did you mean 'generate'? known: bench"),
        ("lm-eval", "unknown command 'lm-eval'; did you mean 'lm_eval'? known: bench"),
        ("x", "unknown command 'x'; known: benchmark, cluster, "),
        ("__init__", "unknown command '__init__'; known: benchmark, "),
        ("--seed=1", "--seed=1 comes before the command; write moe-edge NAME --seed=1"),
    ],
)
def test_what_is_no_command_is_refused_in_one_line(run_command, name, message):
    assert run_command(name).error.startswith(f"error: {message}")


def test_package_names_commands_that_there_are():
    """A wheel has no launch/; what is recorded of past runs stays."""
    of_runs = "training/model_card.py", "workload/routing_fit.py"
    for path in (ROOT / "moe_edge").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named = {*re.findall(r"moe-edge ([a-z]\w*)", text)}
        assert named <= {*main.names()}, path
        if path != Path(main.__file__) and not path.as_posix().endswith(of_runs):
            assert not re.findall(r"launch/[a-z]\w*\.py", text), path


def test_help_shows_how_the_command_was_started(run_command, run_script):
    as_command, as_script = (
        run_command("study", "--help"),
        run_script("study", "--help"),
    )
    assert as_command.code == as_script.code == 0
    assert "moe-edge study smoe_fig14 --data_dir DIR" in as_command.stdout
    assert "launch/" not in as_command.stdout
    assert "python launch/study.py smoe_fig14 --data_dir DIR" in as_script.stdout
    assert "moe-edge" not in as_script.stdout
    assert "--[no]allow_dirty" in as_script.stdout


def test_command_with_a_word_before_its_flags(run_command):
    done = run_command("study", "prism_table1", "--dry_run")
    assert done.summary["dry_run"]
    error = run_command("study", "prism_tabel1").error
    assert "unknown study 'prism_tabel1'; did you mean 'prism_table1'? known:" in error
    error = run_command("benchmark", "--suite", "decod").error
    assert "unknown suite 'decod'; did you mean 'decode'? known:" in error


def test_script_in_a_clone_hides_no_package(run_script, monkeypatch):
    """`python launch/evaluate.py` puts launch/ into sys.path."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])
    seen = []
    monkeypatch.setattr(main, "start", lambda name: seen.append((name, list(sys.path))))
    run_script("evaluate")
    ((name, path),) = seen
    assert name == "evaluate" and str(ROOT / "launch") not in path
    assert str(ROOT) in [str(Path(entry).resolve()) for entry in path]
