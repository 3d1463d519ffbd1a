"""Live studies on a board of a few types."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.studies.live import Executors, LiveSettings
from tests.support.entries import rows_of

FEW = {
    "tasks": ("a1",),
    "memory": "2.7MB,1.5MB",
    "most_types": 20,
    "most_requests": 60,
    "repeats": 2,
}
MORE = {
    "coserve_fig13_live": {},
    "coserve_fig15_live": {"once": ("em_ra",)},
    "coserve_fig17_live": {"executors": ("gpu:1", "gpu:2", "gpu:2,cpu:1")},
    "coserve_fig19": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_live_study_writes_a_valid_entry(name, tmp_path):
    study, folder = find(name), str(tmp_path / "entry")
    settings = study.settings(**FEW, **MORE[name])
    summary = run_study(study, settings, out_dir=folder)
    result = validate_entry(folder)
    check_answer(summary["answer"])
    assert result["kind"] in ("emulated", "measured")
    assert len(summary["checks"]) == 2 and all(summary["checks"].values())
    key = "executors" if name == "coserve_fig17_live" else "policy"
    rows = {row[key]: row for row in rows_of(result, "runs", task="a1")}
    if name in ("coserve_fig13_live", "coserve_fig15_live"):
        if name == "coserve_fig15_live":
            assert rows["em_ra"]["throughput_per_s_n"] == 1
        assert rows["affinity"]["over_first_n"] == 2
        assert rows["coserve"]["time_over_computed"] > 0.5
        assert rows["affinity"]["switches"] >= rows["least loads"]["switches"] > 0
    elif name == "coserve_fig17_live":
        (best,) = summary["numbers"]["best"]
        assert best["executors"] in ("gpu:1", "gpu:2", "gpu:2,cpu:1")
        assert rows["gpu:2"]["computed_per_s"] > 0
    else:
        for policy in ("coserve", "affinity"):
            row = rows[policy]
            for cost in ("scheduling_ms", "inference_ms", "ahead_ms"):
                assert row[cost] > 0
            assert abs(row["gap"]) < 1


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="unknown policy 'best'"):
        LiveSettings(policies=("best",))
    with pytest.raises(ConfigError, match="most_requests must be a positive whole"):
        LiveSettings(most_requests=0)
    with pytest.raises(ConfigError, match="executors is 'gpu', expected such as gpu:2"):
        Executors(executors=("gpu",))
