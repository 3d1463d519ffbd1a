import numpy as np
import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Estimate, Rows
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.smoe.studies.fig10 import (
    STUDY,
    TpotSettings,
    cases_of,
    fit_of,
)
from tests.support.entries import page_of, result_of
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

A = (0.0, 0.2, 0.4, 0.6)


def test_fit_of_finds_the_least_a_of_a_known_curve():
    a_N = np.repeat(A, 3)
    tpot_s_N = 0.02 - 0.01 * a_N
    found = fit_of(a_N, tpot_s_N, None, 2)
    # Halfway between 20 and 14 ms.
    assert found["budget_ms"] == pytest.approx(17)
    (choice,) = found["choice"]
    assert choice["a"] == pytest.approx(0.3, abs=1e-6)
    assert found["linear_r2"] == pytest.approx(1.0)
    assert found["tpot_s"][0.6] == pytest.approx(0.014)
    assert found["change"] == pytest.approx(-0.3)
    (choice,) = fit_of(a_N, tpot_s_N, 0.019, 2)["choice"]
    assert choice["a"] == pytest.approx(0.1, abs=1e-6)


def test_fit_of_says_when_no_a_is_enough():
    a_N, tpot_s_N = np.array(A), np.array([0.02, 0.019, 0.018, 0.017])
    found = fit_of(a_N, tpot_s_N, 0.001, 2)
    assert not found["choice"] and not found["is_certain"]
    enough = fit_of(a_N, tpot_s_N, 0.018, 2)
    assert enough.keys() == found.keys()  # so that bootstraps of starts have both


def test_cases_use_one_margin_and_only_a_of_zero_is_exact():
    for assist in (None, "fiddler"):
        cases = cases_of(TpotSettings(assist=assist))
        options = cases[3, 0.3].options
        assert options.route_options["a"] == options.predictor_options["top_a"] == 0.3
        assert options.assist == assist
        exact = [key for key, case in cases.items() if case.is_exact]
        assert exact == ([(1, 0.0), (3, 0.0)] if assist is None else [])


@pytest.mark.slow
def test_study_writes_an_emulated_entry(tmp_path):
    tiny = write_tiny_checkpoint(tmp_path / "tiny")
    text = tmp_path / "t.txt"
    text.write_text(TEXT * 40)
    settings = TpotSettings(
        checkpoint=str(tiny),
        data_dir=str(tmp_path),
        sources=("t.txt",),
        device_memory="50%",
        batches=(1,),
        a_values=(0.6, 0.0, 0.2, 0.4),
        rounds=1,
        prompt_tokens=16,
        new_tokens=4,
        fidelity_rows=1,
    )
    summary = run_study(STUDY, settings, out_dir=str(tmp_path / "o"))
    result = validate_entry(tmp_path / "o")
    assert result["kind"] == "emulated"
    assert result["workload"]["prompts"][0]["path"] == "t.txt"
    assert len(result["workload"]["prompts"][0]["sha256"]) == 64
    checks = {k: v for k, v in result["checks"].items() if "faster" not in k}
    assert all(checks.values()), checks
    points = summary["numbers"]["points"]
    assert [point["a"] for point in points] == [0.0, 0.2, 0.4, 0.6]
    assert points[0]["agreement"] == 1.0
    assert [fit["batch"] for fit in summary["numbers"]["fits"]] == [1]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"a_values": (0.0, 0.2, 0.4)}, "3 distinct a are too few"),
        ({"a_values": (0.0, 0.2, 0.4, 1.0)}, "a_values must lie in .0, 1"),
        ({"tpot_budget_s": 0.0}, "tpot_budget_s must be positive, got 0"),
        ({"link_factor": -1.0}, "link_factor must be positive, got -1"),
    ],
)
def test_settings_refuse_before_measuring(given, message):
    with pytest.raises(ConfigError, match=message):
        TpotSettings(**given)


def test_page_says_whether_an_a_is_enough(tmp_path):
    for budget_s, said in ((0.017, "the least a is 0.30"), (0.001, "no measured a is")):
        rows = Rows(STUDY.frames)
        rows("asked", 1, budget_s=budget_s, degree=2)
        for a in A:
            agreement = Estimate(0.9, 9, 0.8, 1.0, "all")
            given = {
                "tpot_ms": Estimate(20.0, 3, 19.0, 21.0, "all"),
                "agreement": agreement,
            }
            rows("timing", f"a={a:g}", "25%", 1, **given, perplexity_ratio=1.0)
            for number in range(3):
                rows("rounds", 1, a, number, tpot_s=0.02 - 0.01 * a)
        rows.about["workload"] = {"fidelity_rows": 6, "new_tokens": 48}
        page, figures = page_of(STUDY, result_of(STUDY, rows))
        assert said in page
        figures.draw(tmp_path)
        assert (tmp_path / "plot.png").stat().st_size > 5_000
