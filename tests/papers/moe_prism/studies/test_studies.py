"""Studies of refactored models: sums by hand, refusals, and whole runs (slow)."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from moe_edge.bench.quickstart.texts import BOOKS
from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError, OutputError
from moe_edge.metrics.frames import Rows
from moe_edge.metrics.schema import validate_entry
from moe_edge.model.sub_experts import at_k, split_config
from moe_edge.papers.moe_prism.studies import making, models
from moe_edge.papers.moe_prism.studies.making import check_models, make_models
from moe_edge.papers.moe_prism.studies.models import (
    LG,
    ORIGINAL,
    PAPERS,
    ModelSettings,
)
from moe_edge.papers.moe_prism.studies.quality import (
    Point,
    active_neurons,
    log_interpolate,
)
from moe_edge.papers.moe_prism.studies.studies import (
    Fig8Settings,
    Fig10Settings,
    Table2Settings,
)
from moe_edge.papers.moe_prism.studies.table2 import tell
from tests.support.entries import page_of, result_of, row_of
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint
from tests.support.tiny_models import GQA


def test_active_neurons_count_everything_that_chooses():
    """In thirds of a neuron: GQA has 12 experts of 16 neurons, 3 of them chosen."""
    assert active_neurons(GQA) == pytest.approx(3 * 16 + 12 / 3)
    linear = at_k(split_config(GQA, 4), 5)
    assert active_neurons(linear) == pytest.approx(5 * 4 + 48 / 3)
    proxy = split_config(GQA, 4, gate="proxy_global", gate_neurons=2)
    gate_neurons = 3 * 4 * 2
    assert active_neurons(at_k(proxy, 5)) == pytest.approx(
        5 * 4 + (12 + 2 * gate_neurons) / 3
    )
    calibrated = split_config(GQA, 4, gate="calibrated")
    assert active_neurons(at_k(calibrated, 5)) == pytest.approx(
        5 * 4 + (12 + 3 * 4) / 3
    )


def test_log_interpolate_is_geometric_and_refuses_to_extrapolate():
    known = {10.0: 4.0, 20.0: 16.0}
    assert log_interpolate(15.0, known) == pytest.approx(8.0)
    assert log_interpolate(9.0, known) is None and log_interpolate(21.0, known) is None


def nats(perplexity):
    """Of the tokens of two windows, which are no two equal."""
    rng = np.random.default_rng(int(1000 * perplexity))
    values_T = rng.normal(0, 0.01, 400)
    values_T += math.log(perplexity) - values_T.mean()
    return np.split(values_T, [300])


def table2_entry(points, curve):
    rows = Rows(find("moe_prism_table2").frames)
    tell(rows, "points", points)
    tell(rows, "curve", curve)
    return result_of(find("moe_prism_table2"), rows)


def test_table2_compares_at_equal_k_and_neuron_for_neuron():
    sizes = {
        ORIGINAL: {4: (10, 16.0), 8: (20, 4.0)},
        LG: {4: (10, 16.0), 6: (15, 9.0), 8: (20, 4.0)},
        PAPERS: {4: (15, 6.0), 8: (20, 5.0)},
    }
    points = {
        (name, k): Point(neurons, nats(perplexity))
        for name, by_k in sizes.items()
        for k, (neurons, perplexity) in by_k.items()
    }
    result = table2_entry(points, points)
    found = {row["k"]: row for row in result["numbers"]["at_first"]} | {
        row["k"]: row for row in result["numbers"]["worse"]
    }
    for k, equal, level in ((4, 6 / 16, 6 / 8), (8, 5 / 4, 5 / 4)):
        assert found[k]["ratio"] == pytest.approx(equal)
        assert found[k]["level"] == pytest.approx(level)
        assert 0 < found[k]["ratio_high"] - found[k]["ratio_low"] < 0.02
    law = "LG equals the original at every K that U divides"
    assert result["checks"] == {law: True}
    page, _ = page_of(find("moe_prism_table2"), result)
    assert (
        "Perplexity over the original's, K = 4 / equal neurons: LG 1.000/1.000; "
        "CG, the paper's 0.375/0.750; original at K = 8 0.250."
    ) in page
    assert "in 1 of 4 points: CG, the paper's K=8 (1.250); on" in page
    assert "| CG, the paper's | annealing" in page and "| CG, ours |" not in page
    assert "| CG, the paper's | .947 / .987 / 1.000 / 1.003 | 0.3750 / 1.2500 |" in page
    other = points | {(LG, 8): Point(20, nats(4.1))}
    for pair in ((points, other), (other, points)):
        assert table2_entry(*pair)["checks"] == {law: False}


def test_bad_settings_are_refused():
    for kind, given, message in (
        (Table2Settings, {"k_values": ()}, r"k_values is \(\)"),
        (Table2Settings, {"curve_tokens": 0}, "curve_tokens"),
        (Fig8Settings, {"rounds": 0}, "rounds"),
        (Fig8Settings, {"budgets": ("25",)}, "device memory '25' is no budget"),
        (Fig10Settings, {"batches": (0,)}, "batches"),
        (Fig10Settings, {"rounds": 1}, "rounds is 1, expected 2 or more"),
        (Fig10Settings, {"new_tokens": 2}, "new_tokens is 2, expected 3 or more"),
        (ModelSettings, {"make": ("moe",)}, "unknown gate 'moe'; known: "),
    ):
        with pytest.raises(ConfigError, match=message):
            kind(**given)


def test_models_that_cannot_be_compared_are_refused(tmp_path):
    study, out = find("moe_prism_table2"), str(tmp_path / "out")
    with pytest.raises(ConfigError, match="no refactored checkpoint given"):
        run_study(study, Table2Settings(), out_dir=out)
    with pytest.raises(CheckpointError, match="LG default is not refactored"):
        run_study(study, Table2Settings(lg="default"), out_dir=out)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    """Settings of a small study, its models made from the default model."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "a.txt").write_text(BOOKS.read_text(encoding="utf-8"), encoding="utf-8")
    questions = [
        {"id": f"q/{n}", "task": "t", "prompt": "1 + 1 =", "choices": ["2", "three"],
         "answer_index": 0}
        for n in range(3)
    ]  # fmt: skip
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (folder / "q.jsonl").write_text(lines, encoding="utf-8")
    given = {
        "data_dir": str(folder),
        "work_dir": str(folder / "work"),
        "make": ("lg", "cg"),
        "calibration": ("a.txt",),
        "calibration_tokens": 1024,
    }
    make_models(ModelSettings(**given))
    return given


QUALITY = {"texts": ("a.txt",), "max_tokens": 256, "k_values": (12, 13)}
TIMES = {"rounds": 2, "prompt_tokens": 16, "new_tokens": 4, "sources": ("a.txt",)}
SMALL = {
    "moe_prism_table2": QUALITY | {"curve_k_values": (4, 5), "curve_tokens": 128},
    "moe_prism_table3": {"sets": ("q.jsonl",)},
    "moe_prism_fig8": QUALITY | TIMES | {"budgets": ("50%",)},
    "moe_prism_fig10": QUALITY | TIMES | {"batches": (1,)},
}
CHANGES = ("changes", "change", {"kind": "between whole experts"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "found", "more"),
    [
        ("moe_prism_table2", ("curve", "perplexity", {"model": "LG", "k": 5}), {}),
        ("moe_prism_table3", ("answers", "accuracy", {"model": "original"}), {}),
        ("moe_prism_fig8", CHANGES, {}),
        ("moe_prism_fig8", CHANGES, {"link_factor": None}),  # the machine's own
        ("moe_prism_fig10", ("times", "tpot_ms", {"model": "LG", "k": 13}), {}),
    ],
)
def test_whole_study_writes_a_valid_entry(made, tmp_path, name, found, more):
    study, out = find(name), tmp_path / name
    settings = study.settings(**made, **SMALL[name], **more)
    summary = run_study(study, settings, out_dir=str(out))
    result = validate_entry(out)
    assert result["workload"]["refactored"]["lg"]["gate"]
    if name == "moe_prism_fig8":
        assert result["kind"] == ("measured" if more else "emulated")
        page = (out / "README.md").read_text(encoding="utf-8")
        assert ("The link is the machine's own" in page) is bool(more)
    frame, measure, keys = found
    assert math.isfinite(row_of(result, frame, **keys)[measure])
    # How finely a few short rounds tell times apart is the machine's affair.
    checks = {n: ok for n, ok in summary["checks"].items() if "errors" not in n}
    assert all(checks.values()), summary["checks"]


@pytest.mark.slow
def test_made_models_of_other_settings_are_refused(made):
    lg, cg = (str(Path(made["work_dir"]) / gate) for gate in ("lg", "cg"))
    with pytest.raises(CheckpointError, match="CG, ours .* has a linear gate"):
        check_models(ModelSettings(cg=lg))
    with pytest.raises(CheckpointError, match=f"LG {cg} has a proxy_global gate"):
        check_models(ModelSettings(lg=cg))
    with pytest.raises(CheckpointError, match="CG, central .* has gate_choice fitted"):
        check_models(ModelSettings(cg_central=cg))
    with pytest.raises(CheckpointError, match="CG, the paper's .* has gate_choice fit"):
        check_models(ModelSettings(cg_paper=cg))
    with pytest.raises(CheckpointError, match=f"was not made from {cg}"):
        check_models(ModelSettings(checkpoint=cg, lg=lg))
    with pytest.raises(OutputError, match="profile of 1024 tokens, 9999 are asked"):
        make_models(ModelSettings(**made | {"calibration_tokens": 9999}))
    tuned = shutil.copytree(lg, Path(made["work_dir"]) / "lg_ft") / "manifest.json"
    manifest = json.loads(tuned.read_text("utf-8"))
    manifest["refactor"]["fine_tuned"] = {"steps": 50, "learning_rate": 3e-4}
    tuned.write_text(json.dumps(manifest), encoding="utf-8")
    for fine_tuning, error, message in (
        ({"tokens": 1, "learning_rate": 3e-4}, OutputError, "steps 50, 1 is asked for"),
        ({"tokens": 50 * 16384}, OutputError, "rate 0.0003, 1e-05 is asked for"),
        ({"rate": 1.0}, ConfigError, "fine_tuning has no option 'rate'"),
    ):
        with pytest.raises(error, match=message):
            make_models(
                ModelSettings(**made | {"make": ("lg_ft",), "fine_tuning": fine_tuning})
            )


@pytest.mark.slow
def test_fine_tuned_models_take_the_better_rate(tmp_path, monkeypatch):
    words = " ".join(np.random.default_rng(0).permutation((12 * TEXT).split()))
    (tmp_path / "a.txt").write_text(words)
    monkeypatch.setattr(making, "training_text", lambda data_dir: words)
    fine_tuning = {"tokens": 1024, "batch_tokens": 128, "window": 64, "accumulate": 1}
    given = {
        "checkpoint": str(write_tiny_checkpoint(tmp_path / "tiny")),
        "data_dir": str(tmp_path),
        "calibration": ("a.txt",),
        "calibration_tokens": 1024,
        "make": ("calibrated", "lg_kl", "calibrated_kl"),
        "work_dir": str(tmp_path / "w"),
        "fine_tuning": fine_tuning | {"held_out_rows": 2, "k_stages": 1},
        "rates": (1e-12, 1e-2),
        "rate_tokens": 512,
    }
    settings = make_models(ModelSettings(**given))
    names = [models.ORIGINAL, models.CALIBRATED, models.LG_KL, models.CALIBRATED_KL]
    assert [*settings.checkpoints()] == names
    for field in ("lg_kl", "calibrated_kl"):
        tuned = models.provenance(settings)[field]["fine_tuning"]
        assert tuned["steps"] == 8
        manifest = open_checkpoint(tmp_path / "w" / field).manifest
        stored = manifest["refactor"]["fine_tuned"]
        assert stored["learning_rate"] == 1e-2 and stored["teacher_kl"] == 1.0
        losses = json.loads((tmp_path / "w" / f"{field}_rates.json").read_text())
        assert losses["losses"]["0.01"] < losses["losses"]["1e-12"]
    assert {path.name for path in (tmp_path / "w").iterdir()} == {
        *("profile", "train.txt", "calibrated", "lg_kl", "calibrated_kl"),
        *("lg_kl_rates.json", "calibrated_kl_rates.json"),
    }
    with pytest.raises(OutputError, match="rate 0.01, 1e-12 is asked for"):
        make_models(ModelSettings(**given | {"rates": (1e-12,)}))
    with pytest.raises(CheckpointError, match="LG-FT .* has a fine-tuned linear gate"):
        check_models(
            ModelSettings(checkpoint=given["checkpoint"], lg_ft=settings.lg_kl)
        )
