"""What a refactoring refuses before it works, and how two run at once."""

import shutil
from unittest import mock

import numpy as np
import pytest

from moe_edge.core.checks import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OutputError,
    RequestError,
)
from moe_edge.core.files import locked_folder
from moe_edge.papers.moe_prism.refactor import build, measure
from moe_edge.papers.moe_prism.refactor import run as run_module
from moe_edge.papers.moe_prism.refactor.run import run_refactor
from tests.support.refactored import parent_folder
from tests.support.tiny_checkpoint import write_tiny_checkpoint


def refactor(tiny, profile, out, **options):
    arguments = {"checkpoint": str(tiny), "profile": profile, "ppl_k": ""} | options
    return run_refactor(out_dir=str(out), **arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sub_experts": 5}, ConfigError, "not split into 5.*divisors are 1, 2, 4, 8"),
        ({"sub_experts": 1}, ConfigError, "sub_experts must be a whole number from 2"),
        ({"inactive": 4}, ConfigError, r"inactive is 4, expected 1..3"),
        (
            {"gate": "mlp"},
            ConfigError,
            "unknown gate 'mlp'; known: calibrated, calibrated_ft, cg,",
        ),
        ({"gate": "calibrated"}, ConfigError, "no hidden states.*with --hidden"),
        ({"gate": "calibrated_ft"}, ConfigError, "no --train_text; a model with"),
        ({"gate": "lg_ft"}, ConfigError, "no --train_text; a model with --gate lg_ft"),
        (
            {"gate": "cg", "gate_neurons": 5},
            ConfigError,
            r"gate_neurons must be in 1..4",
        ),
        ({"solver": "best"}, ConfigError, "unknown solver 'best'"),
        ({"importance": "size"}, ConfigError, "unknown importance rule 'size'"),
        ({"ppl_k": "4,x"}, ConfigError, "ppl_k is '4,x', expected `all` or 4,8,12"),
        ({"ppl_k": "0,33"}, ConfigError, r"ppl_k 0 is outside of 1..32"),
        ({"ppl_k": "9", "gate": "cg"}, ConfigError, r"ppl_k 9 is outside of 1..8"),
        ({"train_text": "x"}, ConfigError, "--train_text is for --gate lg_ft or calib"),
        ({"activations": "m.npy"}, ConfigError, "--checkpoint means nothing with"),
        ({"profile": ""}, ConfigError, "no --profile; a model with --gate lg needs"),
        ({"heldout_ratio": 1.0}, ConfigError, "heldout_ratio is 1.0, expected 0 to"),
        ({"min_tokens": 0}, ConfigError, "min_tokens must be a positive whole"),
        (
            {"min_tokens": 2.5},
            ConfigError,
            "min_tokens must be a positive whole",
        ),
        (
            {"gate_neurons": 2},
            ConfigError,
            "--gate_neurons is for --gate cg, got",
        ),
        ({"proxy_rule": "pattern"}, ConfigError, "--proxy_rule is for --gate cg"),
        (
            {"max_minutes": 1.0},
            ConfigError,
            "--max_minutes is for --gate lg_ft or calibrated_ft, got",
        ),
        (
            {"gate": "lg_ft", "train_text": "t", "max_minutes": float("nan")},
            ConfigError,
            "max_minutes must be 0 or more and finite, got nan",
        ),
        (
            {"gate": "cg", "fine_tuning": {"tokens": 9}},
            ConfigError,
            "--fine_tuning is for --gate lg_ft or calibrated_ft, got --gate cg",
        ),
        ({"profile": "/nowhere"}, CheckpointError, "holds no profile.json"),
    ],
)
def test_bad_input(options, error, message, tiny, profile, tmp_path):
    with pytest.raises(error, match=message):
        refactor(tiny, out=tmp_path / "r", **{"profile": profile} | options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flag",
    [
        *({"gate": "cg"}, {"weigh_neurons": False}, {"weigh_tokens": True}),
        *({"text": "t"}, {"ppl_k": "4"}, {"max_minutes": 1.0}, {"profile": "p"}),
        *({"importance": "usage"}, {"min_tokens": 9}, {"fine_tuning": {}}),
    ],
)
def test_flags_of_a_model_are_refused_with_a_matrix(flag, tmp_path):
    np.save(tmp_path / "m.npy", np.ones((8, 8)))
    with pytest.raises(ConfigError, match=f"--{[*flag][0]} means nothing with"):
        run_refactor(
            out_dir=str(tmp_path / "r"), activations=str(tmp_path / "m.npy"), **flag
        )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fine_tuning": 3}, ConfigError, "fine_tuning is 3, expected options by name"),
        (
            {"teacher_kl": True, "fine_tuning": {"k_order": "rising"}},
            ConfigError,
            "fine_tuning names k_order, which --teacher_kl sets, too",
        ),
        (
            {"fine_tuning": {"token": 3}},
            ConfigError,
            "no option 'token'; known: ",
        ),
        ({"fine_tuning": {"k_start": 99}}, ConfigError, "99"),
        (
            {"fine_tuning": {"window": 512}},
            CapacityError,
            "exceeds the model's con",
        ),
        ({"train_text": ","}, ConfigError, "train_text names no file"),
        ({"train_text": "/nowhere.txt"}, FileNotFoundError, "nowhere"),
        ({"train_text": "short"}, RequestError, "more than two windows of 64"),
    ],
)
def test_fine_tuning_is_checked_before_any_work(
    options, error, message, tiny, profile, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "build_refactoring", None)  # it would fail there
    arguments = {"gate": "lg_ft", "train_text": text, "dry_run": True}
    arguments |= {"fine_tuning": {"window": 64, "batch_tokens": 64}} | options
    if arguments["train_text"] == "short":
        (tmp_path / "short.txt").write_text("a b")
        arguments["train_text"] = str(tmp_path / "short.txt")
    with pytest.raises(error, match=message):
        refactor(tiny, profile, tmp_path / "r", **arguments)


def test_fine_tuning_that_fits_passes_a_dry_run(tiny, profile, text, tmp_path):
    given = {"gate": "lg_ft", "train_text": text, "dry_run": True}
    given["fine_tuning"] = {"window": 64, "batch_tokens": 64}
    assert refactor(tiny, profile, tmp_path / "r", **given)


@pytest.mark.parametrize("where", ["parent", "profile", "below", "above"])
def test_output_is_apart_from_what_is_read(where, tiny, profile, tmp_path):
    sources = tmp_path / "in"
    shutil.copytree(tiny, sources / "tiny")
    shutil.copytree(profile, sources / "p")
    (sources / "config.gin").touch()  # as if it were an earlier result
    out = {
        "parent": sources / "tiny",
        "profile": sources / "p",
        "below": sources / "p" / "out",
        "above": sources,
    }[where]
    before = sorted(sources.rglob("*"))
    if where == "profile":
        (sources / "p" / "config.gin").touch()
        before = sorted(sources.rglob("*"))
    with pytest.raises(OutputError, match="overlaps the source"):
        refactor(sources / "tiny", sources / "p", out, overwrite=True)
    assert sorted(sources.rglob("*")) == before


def test_a_matrix_is_not_replaced_by_its_labels(tmp_path):
    np.save(tmp_path / "m.npy", np.ones((8, 8)))
    (tmp_path / "config.gin").touch()
    with pytest.raises(OutputError, match="overlaps the source .*m.npy"):
        run_refactor(
            out_dir=str(tmp_path), activations=str(tmp_path / "m.npy"), overwrite=True
        )
    assert (tmp_path / "m.npy").is_file()


def test_a_text_of_one_token_is_refused_before_any_work(tiny, profile, tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("a")
    with pytest.raises(RequestError, match="has 1 tokens read, expected at least 2"):
        refactor(tiny, profile, tmp_path / "r", ppl_k="4", text=str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["one.txt"]


def test_profile_of_another_checkpoint_is_refused(profile, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "other", rms_norm_eps=1e-6)
    path = other / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32(0.5).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is of checkpoint .* with content"):
        refactor(other, profile, tmp_path / "r")


WIDTH = {"intermediate_size": 40}


@pytest.mark.parametrize(
    ("family", "dtype", "gate", "subs", "rounds"),
    [
        ("mixtral", "bfloat16", "lg", 5, True),
        ("mixtral", "bfloat16", "lg", 4, False),
        ("mixtral", "float32", "lg", 5, False),
        ("mixtral", "bfloat16", "cg", 5, False),
        ("gpt_oss", "bfloat16", "cg", 5, True),  # a fifth of each down bias
        ("gpt_oss", "bfloat16", "cg", 4, False),
    ],
)
def test_rounding_is_said(
    family, dtype, gate, subs, rounds, tmp_path, monkeypatch, capsys
):
    parent = parent_folder(tmp_path / "hf", family, torch_dtype=dtype, **WIDTH)
    monkeypatch.setattr(run_module, "open_profile", mock.Mock())
    options = {"gate": gate, "sub_experts": subs, "dry_run": True}
    refactor(parent, "profile", tmp_path / "r", **options)
    said = "are no power of two" in capsys.readouterr().err
    assert said == rounds


def test_a_second_run_is_refused_a_killed_one_goes_on(tiny, profile, tmp_path, capsys):
    out, work = tmp_path / "r", tmp_path / "r.partition"
    with locked_folder(work, "r"):
        with pytest.raises(
            OutputError, match="another run .* is writing .*/r; wait for"
        ):
            refactor(tiny, profile, out)
        assert work.is_dir() and not out.exists()
    with mock.patch.object(measure, "measure_model", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            refactor(tiny, profile, out)
    assert f"unfinished work is kept in {out}.partition" in capsys.readouterr().err
    assert not out.exists()
    with mock.patch.object(build, "build_refactoring", None):  # it is there
        summary = refactor(tiny, profile, out)
    assert summary["identity_error"] <= 1e-5
    assert (out / "manifest.json").is_file() and (out / "report.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
