"""Figures 7 and 12: the entry from figures given by hand, and settings refused."""

import dataclasses
import json

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer
from moe_edge.papers.moe_prism.studies.serving_entry import (
    AT_ONCE,
    COMPUTED,
    MEASURED,
    SAME,
    Runs,
    findings,
)
from moe_edge.papers.moe_prism.studies.serving_studies import (
    FIFO,
    OURS,
    OURS_ORIGINAL,
    PRISM,
    Fig12Settings,
    ServingStudySettings,
)

LOADS = (0.5, 1.0)


def figures(rate: float, tpot_ms: float, floor_violations: int = 0) -> dict:
    times = {"mean": tpot_ms, "p95": 2 * tpot_ms}
    return {
        "throughput_req_s": rate,
        "ttft_ms": times,
        "tpot_ms": times,
        "e2e_ms": {"mean": 50 * tpot_ms},
        "slo_attainment": 0.5,
        "mean_k": 18.0,
        "floor_violations": floor_violations,
    }


@pytest.fixture
def settings() -> ServingStudySettings:
    return ServingStudySettings(
        systems=(FIFO, PRISM, OURS), loads=LOADS, rounds=2, lg="unused"
    )


def runs_of(settings, computed_error: float = 0.0, below: int = 0) -> Runs:
    runs, gains = Runs(), {FIFO: 1.0, PRISM: 1.1, OURS_ORIGINAL: 1.2, OURS: 1.25}
    for number in range(settings.rounds):
        for system in settings.systems:
            gain = gains[system] + (0.1 * number if system == PRISM else 0.0)
            for load in (*settings.loads, AT_ONCE):
                rate = 10.0 * min(load, 2.0) * gain * (1 + number)
                for kind in (MEASURED, SAME, COMPUTED):
                    off = 1 + (computed_error if kind == SAME else 0.0)
                    runs.add(kind, system, load, figures(rate * off, 8.0, below))
    return runs


def test_gains_are_of_rounds_and_the_best_is_named(settings):
    found = findings(settings, runs_of(settings), 10.0, 0, {})
    check_answer(found.answer)
    assert found.answer.startswith(f"{OURS} serves most, 37.50 requests/s")
    assert f"(+25.0% [+25.0%, +25.0%] to {FIFO})" in found.answer
    assert found.ours == {
        f"throughput over {FIFO}, {PRISM}": "+15.0% [+10.0%, +20.0%]",
        f"throughput over {FIFO}, {OURS}": "+25.0% [+25.0%, +25.0%]",
    }
    assert all(found.checks.values()) and len(found.checks) == 5
    rows = {(row["policy"], row["name"]): row for row in found.metrics}
    row = rows[OURS, "throughput, load 1, measured"]
    assert row["value"] == pytest.approx(18.75)  # median of 12.5 and 25
    assert row["spread"]["value"] == pytest.approx(6.25) and row["n"] == 2


@pytest.mark.parametrize("error", [0.04, 0.06])
def test_computed_throughput_is_held_against_the_same_requests(settings, error):
    found = findings(settings, runs_of(settings, error), 10.0, 0, {})
    assert found.checks["computed throughput within 5% of measured"] == (error < 0.05)
    assert any(
        f"throughput at most {error:.1%} apart" in line for line in found.details
    )


def test_what_each_part_brings_is_told_where_both_ran(settings):
    """Sub-experts against the same policy on the original, the loop against FIFO."""
    settings = dataclasses.replace(settings, systems=(FIFO, OURS_ORIGINAL, OURS))
    runs = runs_of(settings)
    told = [x for x in findings(settings, runs, 10.0, 0, {}).details if "Brought" in x]
    assert told == [
        f"Brought by our loop ({OURS_ORIGINAL} over {FIFO}): throughput with all "
        "requests at once +20.0% [+20.0%, +20.0%], TPOT at load 1 +0.0% [+0.0%, "
        "+0.0%].",
        f"Brought by sub-experts in our loop ({OURS} over {OURS_ORIGINAL}): throughput "
        "with all requests at once +4.2% [+4.2%, +4.2%], TPOT at load 1 +0.0% [+0.0%, "
        "+0.0%].",
    ]


def test_late_compilation_and_tokens_below_a_floor_are_told(settings):
    found = findings(settings, runs_of(settings, below=1), 10.0, 3, {})
    assert [passed for passed in found.checks.values()][:2] == [False, False]


def test_every_run_is_kept_and_drawn(settings, tmp_path):
    found = findings(settings, runs_of(settings), 10.0, 0, {})
    kept = json.loads(found.files["runs.json"])
    assert {row["kind"] for row in kept} == {MEASURED, SAME, COMPUTED}
    assert all(len(row["rounds"]) == 2 for row in kept)
    found.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_systems_and_loads_are_checked():
    with pytest.raises(ConfigError, match="system 'LIFO'.*FIFO.*elastic"):
        ServingStudySettings(systems=("LIFO",))
    with pytest.raises(ConfigError, match=r"\['FIFO', 'FIFO'\] name one twice"):
        Fig12Settings(systems=(FIFO, FIFO))
    with pytest.raises(ConfigError, match="loads must be positive, got 0.0"):
        ServingStudySettings(loads=(0.0,))
