"""Studies of the shadow: recall over recorded runs, and their entries."""

import numpy as np
import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.studies.one_machine import (
    GATE,
    LRU,
    cases_of,
    shadow_name,
)
from moe_edge.papers.od_moe.studies.recorded import Recall, Runs, bar_checks
from moe_edge.papers.od_moe.studies.studies import (
    STUDIES,
    Fig3Settings,
    Fig6Settings,
    OneMachineSettings,
    RecallSettings,
    Table1Settings,
)
from moe_edge.papers.od_moe.studies.table1 import ANY, NEXT, PRECISION, Judged
from moe_edge.predict.accuracy import PredictionLog
from tests.support.entries import page_of, result_of, rows_of
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

ONE = np.array([[[0, 1]], [[2, 3]]])  # two steps of one layer
TWO = np.array([[[4, 5]]])  # a prompt that ended after one


def test_recall_of_runs_of_unequal_length():
    one = Recall([ONE, TWO], [np.array([[[1, 0]], [[2, 7]]]), np.array([[[4, 9]]])])
    assert one.overall == pytest.approx(4 / 6)
    np.testing.assert_allclose(one.by_index, [3 / 4, 1 / 2])
    low, high = one.interval
    assert 0.5 <= low < one.overall < high <= 0.75
    assert (one.estimate.n, one.estimate.value) == (3, one.overall)
    assert one.last == 1 / 2  # of two indexes the second


def test_bars_are_those_of_the_precisions_that_ran():
    checks = bar_checks({"int8": 0.996, "nf4": 0.97, "bf16": 0.1})
    assert list(checks.values()) == [True, False]


def test_judged_counts_what_was_not_predicted():
    log, judged = PredictionLog(2, 8), Judged()
    for _ in range(3):  # the second layer only, after the first
        log.chosen(0, np.array([[0, 1]]))
        log.expect(0, np.array([[2, 3, 4]]))
        log.chosen(1, np.array([[3, 7]]))
    judged.add(log, 3 * 2 * 2)
    shares = {name: one.value for name, one in judged.shares().items()}
    assert shares == {ANY: 3 / 12, NEXT: 1 / 2, PRECISION: 1 / 3}


def test_shadow_gives_its_bytes_for_slots_and_the_control_does_not():
    cases = cases_of(OneMachineSettings(), {"int8": 0.6, "nf4": 0.35}, 1 / 384)
    assert {key: case.budget for key, case in cases.items()} == {
        (LRU, "50%"): "50.00%",
        (GATE, "50%"): "50.00%",
        (shadow_name("int8", True), "50%"): "50.00%",
        (shadow_name("nf4", True), "50%"): "50.00%",
        (shadow_name("nf4"), "50%"): "15.00%",
        (LRU, "75%"): "75.00%",
        (GATE, "75%"): "75.00%",
        (shadow_name("int8", True), "75%"): "75.00%",
        (shadow_name("int8"), "75%"): "15.00%",
        (shadow_name("nf4", True), "75%"): "75.00%",
        (shadow_name("nf4"), "75%"): "40.00%",
    }
    assert all(case.is_exact for case in cases.values())


def test_answer_names_the_best_and_the_worst():
    ratios = {
        (GATE, "50%", 2.0): 0.9,
        (shadow_name("nf4"), "50%", 2.0): 1.5,
        (shadow_name("nf4"), "50%", 8.0): 2.5,
        (shadow_name("nf4", True), "50%", 2.0): 0.95,
    }

    def page():
        study = STUDIES["od_moe_one_machine"]
        rows = Rows(study.frames)
        rows("shadows", "nf4", bytes_share=0.35, token_over=1.9)
        for key, ratio in ratios.items():
            rows("cases", *key, tpot_ms=ratio, hit_ratio=0.5, over_lru=ratio)
        return page_of(study, result_of(study, rows))[0]

    words = page()
    assert "1.50 times LRU's time per token at best (nf4, 50%, link 2x)" in words
    assert "2.50 at worst; with its bytes free 0.95 at best" in words
    ratios = {key: value for key, value in ratios.items() if value not in (1.5, 2.5)}
    assert "**No shadow leaves room for slots; with its bytes free 0.95" in page()


@pytest.mark.parametrize(
    "kind, change, message",
    [
        (Fig3Settings, {"precisions": ("int8", "q3")}, "precision 'q3'; known"),
        (Fig6Settings, {"periods": ()}, "periods is .*, expected a list"),
        (Fig6Settings, {"periods": (1, 0)}, "periods must be a positive whole .* 0"),
        (Table1Settings, {"device_memory": "lots"}, "lots"),
        (
            OneMachineSettings,
            {"link_factors": (2, -1)},
            "link_factors .* positive.* -1",
        ),
        (
            OneMachineSettings,
            {"budgets": ("1MiB",)},
            "budgets holds '1MiB', expected sh",
        ),
    ],
)
def test_settings_that_cannot_run_are_refused(kind, change, message):
    with pytest.raises(ConfigError, match=message):
        kind(**change)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("od_moe")
    tiny = write_tiny_checkpoint(folder / "tiny")
    (folder / "t.txt").write_text(TEXT * 40)
    return {"checkpoint": str(tiny), "data_dir": str(folder), "sources": ("t.txt",)}


SMALL = {"rounds": 2, "prompt_tokens": 16, "new_tokens": 9}


@pytest.mark.slow
def test_model_is_its_own_shadow(sources):
    runs = Runs(RecallSettings(**sources, **SMALL))
    assert runs.recall(Shadow("full")).overall == 1.0
    assert runs.recall(Shadow("full", 0, 0)).overall == 1.0  # it never errs
    assert 0.6 < runs.recall(Shadow("nf4")).overall < 1.0
    assert runs.workload["decode_steps"] == sum(len(run.tokens) for run in runs.runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, change, rows",
    [
        ("od_moe_fig3", {"precisions": ("fp16", "nf4")}, {"recall": 2 * 3}),
        ("od_moe_fig6", {"periods": (1, 2)}, {"recall": 4}),
        (
            "od_moe_table1",
            {"precisions": ("int8",), "device_memory": "60%", "history": 2},
            {"recall": 7 + 1},
        ),
        (
            "od_moe_one_machine",
            {"precisions": ("nf4",), "budgets": ("100%",), "link_factors": (2.0,)},
            {"shadows": 1, "cases": 3},
        ),
    ],
)
def test_study_writes_an_entry(sources, tmp_path, name, change, rows):
    study = STUDIES[name]
    settings = study.settings(**sources, **SMALL, **change)
    summary = run_study(study, settings, out_dir=str(tmp_path / "o"))
    result = validate_entry(tmp_path / "o")
    assert {name: len(rows_of(result, name)) for name in rows} == rows
    exact = {
        k: v for k, v in summary["checks"].items() if "exactly" in k or "gave" in k
    }
    assert all(exact.values()) and (exact or name == "od_moe_fig6")
    for row in rows_of(result, "recall") if "recall" in rows else ():
        assert 0 <= row["recall"] <= 1
