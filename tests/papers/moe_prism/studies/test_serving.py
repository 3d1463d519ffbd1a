"""Figures 7 and 12: the entry from figures given by hand, and settings refused."""

import dataclasses
import json

import pytest

from moe_edge.bench.started import started
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows, plain, tables
from moe_edge.papers.moe_prism.studies.serving import seed_of
from moe_edge.papers.moe_prism.studies.serving_entry import (
    AT_ONCE,
    Runs,
    below_floor,
    tell_runs,
)
from moe_edge.papers.moe_prism.studies.serving_studies import (
    COMPUTED,
    FIFO,
    MEASURED,
    MODEL_ONLY,
    OURS,
    OURS_ORIGINAL,
    PRISM,
    SAME,
    SCHEDULER_ONLY,
    STUDY,
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


def told(settings, runs):
    """Frames and numbers of runs."""
    rows = Rows(STUDY.frames)
    tell_runs(rows, settings, runs, 10.0)
    found = tables(rows.stored())
    return found, plain(STUDY.derive(found))


def gains_of(rows):
    keys = "gain", "gain_low", "gain_high"
    return [tuple(round(row[key], 4) for key in keys) for row in rows]


def test_gains_are_of_rounds_and_the_best_is_named(settings):
    frames, numbers = told(settings, runs_of(settings))
    assert numbers["base"] == FIFO and numbers["top"] == "load 1"
    assert numbers["best"]["system"] == OURS
    assert numbers["best"]["throughput"] == pytest.approx(37.5)
    assert gains_of(numbers["best_gain"]) == [(0.25, 0.25, 0.25)]
    assert gains_of(numbers["scheduler"]) == [(0.15, 0.1, 0.2)]
    assert all(numbers["checks"].values()) and len(numbers["checks"]) == 3
    figures = frames["figures"].set_index(["system", "load", "kind"])
    row = figures.loc[OURS, "load 1", MEASURED]
    assert row.throughput == pytest.approx(18.75)  # median of 12.5 and 25
    bounds = row.throughput_low, row.throughput_high
    assert bounds == pytest.approx((12.5, 25)) and row.throughput_n == 2


@pytest.mark.parametrize("error", [0.04, 0.06])
def test_computed_throughput_is_held_against_the_same_requests(settings, error):
    _, numbers = told(settings, runs_of(settings, error))
    name = "computed throughput within 5% of measured"
    assert numbers["checks"][name] == (error < 0.05)
    (off,) = [one for one in numbers["off"] if one["figure"] == "throughput"]
    assert off["error"] == pytest.approx(error)


def test_what_each_part_brings_is_told_where_both_ran(settings):
    """Sub-experts against the same policy on the original, the loop against FIFO."""
    settings = dataclasses.replace(settings, systems=(FIFO, OURS_ORIGINAL, OURS))
    _, numbers = told(settings, runs_of(settings))
    found = {(row["part"], row["figure"]): row for row in numbers["parts"]}
    assert list(found) == [
        ("our loop", "throughput"),
        ("our loop", "TPOT"),
        ("sub-experts in our loop", "throughput"),
        ("sub-experts in our loop", "TPOT"),
    ]
    assert gains_of(found.values()) == [
        *((0.2, 0.2, 0.2), (0.0, 0.0, 0.0)),
        *((0.0417, 0.0417, 0.0417), (0.0, 0.0, 0.0)),
    ]


def test_tokens_below_a_floor_are_counted(settings):
    assert below_floor(settings, runs_of(settings)) == 0
    each = len(settings.systems) * (len(LOADS) + 1) * settings.rounds
    assert below_floor(settings, runs_of(settings, below=1)) == 2 * each


def test_every_run_is_kept(settings):
    kept = json.loads(runs_of(settings).to_json())
    assert {row["kind"] for row in kept} == {MEASURED, SAME, COMPUTED}
    assert all(len(row["rounds"]) == 2 for row in kept)


def test_one_study_runs_the_systems_of_both_figures():
    settings = ServingStudySettings(lg="unused")
    figure_7 = ("FIFO", "FullBatch", "MoE-Prism", "continuous", "elastic")
    figure_12 = (FIFO, MODEL_ONLY, SCHEDULER_ONLY, PRISM, OURS_ORIGINAL, OURS)
    assert {*figure_7, *figure_12} <= set(settings.systems)
    assert settings.systems[0] == FIFO and {0.4, 0.7, 1.0} == set(settings.loads)


def test_every_round_and_every_start_has_requests_of_its_own(settings):
    one, found = dataclasses.replace(settings, rounds=1), []
    for number in range(5):
        with started(number):
            found += [seed_of(one, 0, load) for load in (*LOADS, AT_ONCE)]
    assert len(set(found)) == len(found) == 15
    alone = [seed_of(settings, n, load) for n in (0, 1) for load in (*LOADS, AT_ONCE)]
    assert alone == found[:6]


def test_systems_and_loads_are_checked():
    with pytest.raises(ConfigError, match="system 'LIFO'.*FIFO.*elastic"):
        ServingStudySettings(systems=("LIFO",))
    with pytest.raises(ConfigError, match=r"\['FIFO', 'FIFO'\] name one twice"):
        ServingStudySettings(systems=(FIFO, FIFO))
    with pytest.raises(ConfigError, match=r"systems are \['FIFO'\], expected two"):
        ServingStudySettings(systems=(FIFO,))
    with pytest.raises(ConfigError, match="loads must be positive, got 0.0"):
        ServingStudySettings(loads=(0.0,))
