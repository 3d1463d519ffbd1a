"""Suite `coserve` on a board of a few types, and what its rows say."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.studies.speed import CoserveSettings, decision_rows

DECISIONS = {"waiting": 40, "decisions": 60, "repeats": 2}
FEW = {
    "tasks": ("a1",),
    "memory": "2.7MB,1.5MB",
    "most_types": 12,
    "most_requests": 60,
}


def test_decisions_are_timed_with_as_many_waiting():
    rows = decision_rows(CoserveSettings(**DECISIONS))
    assert [row["case"] for row in rows] == [
        f"decision p{share}, {policy}, 4 executors, 40 wait{when}"
        for policy, when in (
            ("coserve", ""),
            ("affinity", ""),
            ("affinity", ", all late"),
        )
        for share in (50, 99)
    ]
    for row in rows:
        assert (
            row["bar"] == 50 and row["unit"] == "us" and len(row["runs"]["ours"]) == 2
        )
        assert 0 < row["ours"] < 1e6  # however busy the machine is
    assert rows[0]["ours"] <= rows[1]["ours"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": ("c1",)}, "unknown task 'c1'; known: a1"),
        ({"once": ("best",)}, "unknown policy 'best'; known: affinity"),
        ({"waiting": 0}, "waiting must be a positive whole number, got 0"),
        ({"decay": -1.0}, "decay must be positive, got -1.0"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        CoserveSettings(**given)


@pytest.mark.slow
def test_suite_runs_live_and_writes_a_valid_entry(tmp_path):
    study, folder = find("benchmark_coserve"), str(tmp_path / "entry")
    summary = run_study(study, study.settings(**FEW, **DECISIONS), out_dir=folder)
    result = validate_entry(folder)
    check_answer(result["answer"])
    assert result["kind"] in ("emulated", "measured")
    rows = {row["case"]: row for row in summary["rows"]}
    peers = [row["case"] for row in summary["rows"] if row["peer"] is not None]
    beside = {"coserve": ["samba"], "affinity": ["samba", "samba_no_tier", "coserve"]}
    for policy, others in beside.items():
        assert {f"a1, {policy} beside {other}" for other in others} <= set(peers)
    assert (
        rows["a1, affinity, switches"]["ours"] >= rows["a1, affinity, switches"]["peer"]
    )
    for policy in ("samba", "coserve", "affinity", "samba_no_tier"):
        assert f"a1, {policy}, switches apart from computed" in rows
        assert f"a1, {policy}, time apart from computed" in rows
    assert rows["a1, coserve, scheduling"]["ours"] > 0
    assert rows["a1, coserve, management"]["unit"] == "%"
