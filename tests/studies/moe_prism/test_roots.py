"""Studies of refactored models: sums by hand, refusals, and whole runs (slow)."""

import json
import math
import shutil
from pathlib import Path

import pytest

from moe_edge.core.checks import CheckpointError, ConfigError, OutputError
from moe_edge.metrics.schema import validate_entry
from moe_edge.model.sub_experts import at_k, split_config
from moe_edge.studies.moe_prism import fig10
from moe_edge.studies.moe_prism.models import check_models, make_models
from moe_edge.studies.moe_prism.quality import Point, findings, ratios
from moe_edge.studies.moe_prism.roots import run_elastic
from moe_edge.studies.moe_prism.settings import (
    CG,
    LG,
    ORIGINAL,
    ElasticSettings,
    active_neurons,
    log_interpolate,
)
from moe_edge.studies.quickstart.texts import BOOKS
from tests.support.tiny_models import GQA


def test_active_neurons_count_all_gate_neurons_of_the_chosen_parents():
    assert active_neurons(at_k(split_config(GQA, 4), 5)) == 5 * 4
    proxy = split_config(GQA, 4, gate="proxy_global", gate_neurons=2)
    assert active_neurons(at_k(proxy, 5)) == 5 * 4 + 3 * 4 * 2
    assert active_neurons(GQA) == 3 * 16


def test_log_interpolate_is_geometric_and_refuses_to_extrapolate():
    known = {10.0: 4.0, 20.0: 16.0}
    assert log_interpolate(15.0, known) == pytest.approx(8.0)
    assert log_interpolate(9.0, known) is None and log_interpolate(21.0, known) is None


def point(k, neurons, perplexity):
    return Point(k, neurons, 100 * math.log(perplexity), 100)


def test_findings_compare_at_equal_k_and_neuron_for_neuron():
    points = {
        ORIGINAL: {4: point(1, 10, 16.0), 8: point(2, 20, 4.0)},
        LG: {4: point(4, 10, 16.0), 6: point(6, 15, 9.0), 8: point(8, 20, 4.0)},
        CG: {4: point(4, 15, 6.0), 8: point(8, 20, 5.0)},
    }
    found = ratios(points, CG)
    assert found[4] == (pytest.approx(6 / 16), pytest.approx(6 / 8))
    assert found[8] == (pytest.approx(5 / 4), pytest.approx(5 / 4))
    entry = findings(points, 4, [], ElasticSettings(lg="x")).entry
    assert entry["checks"] == {"LG equals the original at every K that U divides": True}
    assert "CG K=8 (1.250)" in entry["answer"]
    points[LG][8] = point(8, 20, 4.01)
    assert not any(findings(points, 4, [], ElasticSettings()).entry["checks"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "fig99", "lg": "x"}, "unknown study 'fig99'"),
        ({"name": "moe_prism_table2"}, "no refactored checkpoint given"),
        ({"name": "moe_prism_table2", "k_values": ()}, r"k_values is \(\)"),
        ({"name": "moe_prism_table2", "rounds": 0}, "rounds"),
        ({"name": "moe_prism_table2", "make": ("moe",)}, "unknown gate 'moe'; known: "),
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(
    arguments, message, tmp_path
):
    with pytest.raises(ConfigError, match=message):
        run_elastic(out_dir=str(tmp_path / "out"), **arguments)
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_compared_are_refused():
    with pytest.raises(CheckpointError, match="LG default is not refactored"):
        check_models(ElasticSettings(lg="default"))


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
        "texts": ("a.txt",),
        "max_tokens": 256,
        "k_values": (12, 13),
        "sets": ("q.jsonl",),
        "batches": (1,),
        "rounds": 2,
        "prompt_tokens": 16,
        "new_tokens": 4,
        "budgets": ("50%",),
        "sources": ("a.txt",),
    }
    make_models(ElasticSettings(**given))
    return given


@pytest.mark.parametrize("given", [{"rounds": 1}, {"new_tokens": 2}])
def test_fig10_refuses_too_little_to_compare(given):
    (name,) = given
    with pytest.raises(ConfigError, match=f"{name} is [12], expected [23] or more"):
        fig10.run(ElasticSettings(**given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("moe_prism_table2", ("perplexity", "LG", "13")),
        ("moe_prism_table3", ("accuracy", "original")),
        ("moe_prism_fig8", ("tpot_change", "50%, between whole experts")),
        ("moe_prism_fig10", ("operating_points", "LG, batch 1")),
    ],
)
def test_whole_study_writes_a_valid_entry(made, tmp_path, name, found):
    out = tmp_path / name
    summary = run_elastic(name=name, out_dir=str(out), **made)
    validate_entry(out)
    value = json.loads(json.dumps(summary))
    for key in found:
        value = value[key]
    assert math.isfinite(value)
    assert all(summary["checks"].values()), summary["checks"]


@pytest.mark.slow
def test_made_models_of_other_settings_are_refused(made):
    lg, cg = (str(Path(made["work_dir"]) / gate) for gate in ("lg", "cg"))
    with pytest.raises(CheckpointError, match="CG .* has a linear gate"):
        check_models(ElasticSettings(cg=lg))
    with pytest.raises(CheckpointError, match=f"LG {cg} has a proxy_global gate"):
        check_models(ElasticSettings(lg=cg))
    with pytest.raises(CheckpointError, match=f"was not made from {cg}"):
        check_models(ElasticSettings(checkpoint=cg, lg=lg))
    with pytest.raises(OutputError, match="profile of 1024 tokens, 9999 are asked"):
        make_models(ElasticSettings(**made | {"calibration_tokens": 9999}))
    tuned = shutil.copytree(lg, Path(made["work_dir"]) / "lg_ft") / "manifest.json"
    manifest = json.loads(tuned.read_text("utf-8"))
    manifest["refactor"]["fine_tuned"] = {"steps": 50, "learning_rate": 3e-4}
    tuned.write_text(json.dumps(manifest), encoding="utf-8")
    asked = {"make": ("lg_ft",), "fine_tuning": {"tokens": 1, "learning_rate": 3e-4}}
    with pytest.raises(OutputError, match="fine-tuned with steps 50, 1 is asked for"):
        check_models(make_models(ElasticSettings(**made | asked)))
    asked["fine_tuning"] = {"tokens": 50 * 16384}
    with pytest.raises(OutputError, match="learning_rate 0.0003, 1e-05 is asked for"):
        check_models(make_models(ElasticSettings(**made | asked)))
    asked["fine_tuning"] = {"rate": 1.0}
    with pytest.raises(ConfigError, match="fine_tuning has no option 'rate'"):
        check_models(make_models(ElasticSettings(**made | asked)))
