"""The driver of studies, on a study of no cost."""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import pytest

from moe_edge.bench.registry import STUDIES, find
from moe_edge.bench.settings import Positive, Share, Steps, StudySettings, known
from moe_edge.bench.study import (
    Findings,
    Study,
    run_study,
    study_root,
    weights_of,
)
from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.core.out_folder import taken_folder
from moe_edge.metrics import results
from moe_edge.metrics.results import metric
from moe_edge.metrics.schema import validate_entry

LIGHT = (  # what measures is imported when it runs
    *("quickstart", "fidelity_default", "moe_prism_fig3", "moe_prism_fig8"),
    *("moe_prism_fig10", "moe_prism_table2", "moe_prism_table3"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much.

    Attributes:
      rounds: how often.
    """

    rounds: int = 2


def refuse_many(settings):
    if settings.rounds > 9:
        raise ConfigError("too many rounds")


def measure(settings):
    return Findings(
        answer=f"{settings.rounds} rounds.",
        details=["And more."],
        model={"name": "none", "params": 0, "weights": "none"},
        workload={},
        metrics=[metric("ours", "time", 1.0, "s")],
        limits=["a test"],
        checks={"it ran": True},
        plot=lambda path: path.write_bytes(b"png"),
        pictures={"more.png": lambda path: path.write_bytes(b"png")},
        files={"rows.json": "[]"},
        summary={"time": 1.0},
    )


STUDY = Study(
    name="test_study",
    question="How long?",
    settings=Size,
    measure=measure,
    check=refuse_many,
)


def test_study_writes_an_entry_and_tells_it(tmp_path, capsys):
    out = tmp_path / "o"
    summary = run_study(STUDY, Size(), out_dir=str(out), config_text=lambda: "a = 1")
    assert summary == {
        **{"name": "test_study", "answer": "2 rounds.", "out_dir": str(out)},
        **{"checks": {"it ran": True}, "time": 1.0},
    }
    assert "How long?\n2 rounds.\nit ran: yes" in capsys.readouterr().out
    result = validate_entry(out)
    assert result["details"] == ["And more."]
    assert (out / "config.gin").read_text() == "a = 1"
    assert (out / "more.png").is_file() and (out / "rows.json").is_file()


@pytest.mark.parametrize("inline", [True, False])
def test_programs_become_inline_before_a_check_may_start_jax(inline, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "moe_edge.engine.inline.run_inline", lambda: calls.append("inline")
    )
    study = dataclasses.replace(
        STUDY, inline=inline, check=lambda settings: calls.append("check")
    )
    run_study(study, Size(), out_dir="o", dry_run=True)
    assert calls == ["inline"] * inline + ["check"]


def test_a_long_answer_is_told_and_its_measurement_kept(tmp_path, capsys):
    def long_winded(settings):
        return dataclasses.replace(measure(settings), answer="word " * 41)

    study = dataclasses.replace(STUDY, measure=long_winded)
    run_study(study, Size(), out_dir=str(tmp_path / "o"))
    assert (
        "note: the answer has 41 words, expected at most 40" in capsys.readouterr().out
    )
    assert validate_entry(tmp_path / "o")["checks"] == {"it ran": True}


def test_a_study_whose_folder_is_taken_measures_nothing(tmp_path):
    measured = []
    study = Study(
        name="s", question="How much?", settings=Size, measure=measured.append
    )
    with taken_folder(tmp_path / "e"):
        for overwrite in (False, True):
            with pytest.raises(
                OutputError, match=r"\(process .* is writing .*/e; wait"
            ):
                run_study(
                    study, Size(), out_dir=str(tmp_path / "e"), overwrite=overwrite
                )
    assert measured == []


def test_dry_run_checks_and_measures_nothing(tmp_path):
    root = study_root(STUDY)
    out = str(tmp_path / "o")
    assert root(out_dir=out, dry_run=True)["dry_run"] is True
    with pytest.raises(ConfigError, match="too many"):
        root(out_dir=out, rounds=10, dry_run=True)
    with pytest.raises(TypeError, match="rownds"):
        root(out_dir=out, rownds=1)
    assert not (tmp_path / "o").exists()


def test_changed_files_are_no_source_of_committed_results(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    monkeypatch.setattr(results, "git_state", lambda: {"commit": "0", "dirty": True})
    entry = str(tmp_path / "results" / "test_study")
    with pytest.raises(ConfigError, match="add --allow_dirty"):
        run_study(STUDY, Size(), out_dir=entry)
    for out, more in (
        (entry, {"allow_dirty": True}),
        (str(tmp_path / "results" / "local" / "x"), {}),
        (str(tmp_path / "elsewhere"), {}),
    ):
        run_study(STUDY, Size(), out_dir=out, **more)
    monkeypatch.setattr(results, "git_state", lambda: {"commit": "0", "dirty": False})
    run_study(STUDY, Size(), out_dir=entry, overwrite=True)
    with pytest.raises(OutputError, match="not empty"):
        run_study(STUDY, Size(), out_dir=entry)


def test_every_registered_study_has_its_name():
    for name in STUDIES:
        study = find(name)
        assert study.name == name and study.asks.endswith("?")
        assert dataclasses.is_dataclass(study.settings) and study.settings()
    with pytest.raises(ConfigError, match="unknown study 'fig0'; known: "):
        find("fig0")


def test_what_a_study_sets_otherwise_is_checked_as_in_its_part():
    """A default of its own states the type again, and must not lose its check."""
    for name in STUDIES:
        for kind in find(name).settings.__mro__:
            for field, own in vars(kind).get("__annotations__", {}).items():
                for part in kind.__mro__[1:]:
                    was = vars(part).get("__annotations__", {}).get(field, own)
                    kept = own == was or "Annotated" in str(own)
                    assert kept, f"{kind.__name__}.{field}, a part has {was}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked(StudySettings):
    shares: Sequence[Share] = (0.5,)
    names: tuple[Annotated[str, known("name", ("a", "b"))], ...] = ()
    rate: Positive | None = None
    steps: Steps | None = None
    counts: Sequence[int] = (1,)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"shares": (0.1, 1.5)}, r"shares must lie in \[0, 1\], got 1.5"),
        ({"shares": ()}, r"shares is \(\), expected a list of at least one"),
        ({"shares": "0.5"}, "shares is '0.5', expected a list"),
        ({"names": ("a", "c")}, "unknown name 'c'; known: a, b"),
        ({"rate": 0.0}, "rate must be positive, got 0.0"),
        ({"steps": 1}, "steps is 1, expected at least 2"),
        ({"counts": (1, 0)}, "counts must be a positive whole number, got 0"),
    ],
)
def test_a_setting_is_checked_by_its_type(given, message):
    with pytest.raises(ConfigError, match=message):
        Checked(**given)


def test_settings_that_are_left_out_are_not_checked_and_roots_have_plain_types():
    assert Checked(names=("b",)).rate is None
    study = Study("checked", Checked, measure, question="?")
    kinds = inspect.signature(study_root(study)).parameters
    assert kinds["shares"].annotation == Sequence[float]
    assert kinds["names"].annotation == tuple[str, ...]
    assert kinds["rate"].annotation == float | None


def test_settings_of_studies_are_checked_without_jax():
    script = (
        "import sys; from moe_edge.bench.registry import STUDIES, find\n"
        f"for name in {LIGHT}: find(name).settings()\n"
        "print(*{'jax', 'matplotlib', 'scipy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    "checkpoint, weights", [("default", "toy trained here"), ("folder", "given")]
)
def test_an_entry_says_whose_weights_it_is_of(checkpoint, weights):
    assert weights_of(checkpoint) == weights
