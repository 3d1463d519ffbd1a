"""Figures 13 to 16 of CoServe in computed time, on one task."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.studies.entry import OVER_SYSTEMS, SYSTEMS
from moe_edge.papers.coserve.studies.simulated import Simulated


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
    check_answer(result["answer"])
    assert (result["kind"], result["cost_model_source"]) == ("simulated", "preset")
    assert all(summary["checks"].values()) and len(summary["checks"]) == 2
    rows = {(row["policy"], row["name"]): row["value"] for row in result["metrics"]}
    assert rows["coserve", "throughput, uma, b1"] > rows["samba", "throughput, uma, b1"]
    parallel = "uma, parallel loads, b1"  # Samba's one executor gains nothing by them
    assert (
        rows["samba", f"throughput, {parallel}"] == rows["samba", "throughput, uma, b1"]
    )
    assert (
        rows["coserve", f"throughput, {parallel}"]
        > rows["coserve", "throughput, uma, b1"]
    )
    assert f"switches, {parallel}" in {name for _, name in rows}
    claim = result["paper_claim"]
    assert claim["comparable"] is False
    # The paper's range is over three baselines; ours is, too.
    low, high = claim["ours"][OVER_SYSTEMS]["uma"].split("-")
    rate = {name: rows[name, "throughput, uma, b1"] for name in (*SYSTEMS, "coserve")}
    times = [rate["coserve"] / rate[name] for name in SYSTEMS]
    assert float(low) == pytest.approx(min(times), rel=0.05)
    assert float(high) == pytest.approx(max(times), rel=0.05)
    assert claim["paper"][OVER_SYSTEMS]["uma"] == "4.6-12"


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
