"""Figures 13 to 16 of CoServe in computed time, on one task."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.studies.entry import SYSTEMS
from moe_edge.papers.coserve.studies.simulated import Simulated
from tests.support.entries import row_of, rows_of


@pytest.mark.slow
def test_whole_study_writes_a_valid_entry(tmp_path):
    study = find("coserve_fig13")
    settings = study.settings(
        machines=("uma",),
        tasks=("b1",),
        policies=(*SYSTEMS, "coserve"),
        seeds=1,
    )
    summary = run_study(study, settings, out_dir=str(tmp_path / "entry"))
    result = validate_entry(tmp_path / "entry")
    check_answer(summary["answer"])
    assert (result["kind"], result["cost_model_source"]) == ("simulated", "preset")
    assert all(summary["checks"].values()) and len(summary["checks"]) == 2
    rate = {
        (row["place"], row["policy"]): row.get("throughput_per_s")
        for row in rows_of(result, "runs", task="b1")
    }
    parallel = "uma, parallel loads"  # Samba's one executor gains nothing by them
    assert rate["uma", "coserve"] > rate["uma", "samba"] == rate[parallel, "samba"]
    assert rate[parallel, "coserve"] > rate["uma", "coserve"]
    # The paper's range is over three baselines; ours is, too.
    over = {"place": "uma", "base": "Samba-CoE's three systems"}
    span = row_of(result, "over", policy="coserve", **over)
    times = [rate["uma", "coserve"] / rate["uma", name] for name in SYSTEMS]
    assert span["low"] == pytest.approx(min(times), rel=1e-6)
    assert span["high"] == pytest.approx(max(times), rel=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"machines": ("tpu",)}, "unknown machine 'tpu'; known: numa"),
        ({"disks": ("two",)}, "unknown disk 'two'; known: one, parallel"),
        ({"tasks": ("c1",)}, "unknown task 'c1'"),
        ({"policies": ("best",)}, "unknown policy 'best'"),
        ({"decay": 0.0}, "decay must be positive, got 0.0"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Simulated(**given)
