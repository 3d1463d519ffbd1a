"""Time of a prompt by hand, laws, refusals, and the study's entry."""

import dataclasses

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.od_moe.cluster.prefill_timing import Prefill
from tests.support.entries import row_of

FREE = Prefill(
    layers=1,
    rows=8,
    main_s=0.0,
    load_s=0.0,
    row_s=0.0,
    expert_s=0.0,
    expert_row_s=0.0,
    workers=1,
)


def test_one_worker_and_layer_as_in_figure_7():
    """Sending 8 s, computing 8 s, sending back 8 s; in halves they overlap."""
    case = dataclasses.replace(FREE, row_s=1.0, expert_row_s=1.0)
    assert case.ttft_s() == 24
    assert dataclasses.replace(case, mini_batches=2).ttft_s() == 16
    # What is read for each product, however few rows it has, is read more often.
    case = dataclasses.replace(case, expert_s=6.0)
    assert dataclasses.replace(case, mini_batches=2).ttft_s() == 4 + 6 + 6 + 4
    assert dataclasses.replace(case, mini_batches=4).ttft_s() == 2 + 4 * 6 + 2


def test_workers_are_served_in_turn_and_answer_as_they_are_done():
    case = dataclasses.replace(FREE, row_s=1.0, expert_s=2.0, workers=2, main_s=3.0)
    # Main 3; sent to at 7 and 11; computed at 9 and 13; back at 13 and 17.
    assert case.ttft_s() == 17
    assert dataclasses.replace(case, latency_s=0.5).ttft_s() == 18


def test_an_expert_is_loaded_once_the_layer_before_is_computed():
    case = dataclasses.replace(FREE, layers=3, load_s=5.0, expert_s=1.0)
    assert case.ttft_s() == 3 * (5 + 1)
    hidden = dataclasses.replace(case, main_s=7.0)  # loads lie behind the main node
    assert hidden.ttft_s() == 3 * (7 + 1)


@pytest.mark.parametrize("rows, workers, count", [(8, 1, 3), (5, 4, 8), (1, 8, 2)])
def test_mini_batches_are_even_and_never_empty(rows, workers, count):
    case = dataclasses.replace(FREE, rows=rows, workers=workers, mini_batches=count)
    parts = case.parts()
    assert sum(parts) == -(-rows // workers) and min(parts) >= 1
    assert len(parts) <= count and max(parts) - min(parts) <= 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 0}, "rows"),
        ({"mini_batches": 0}, "mini_batches"),
        ({"row_s": -1.0}, "row_s"),
    ],
)
def test_parts_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(FREE, **wrong)


def test_the_study_writes_a_valid_entry(tmp_path):
    study = find("od_moe_prefill")
    settings = study.settings(tokens=(16, 128), mbps=(1000.0,))
    summary = run_study(study, settings, out_dir=str(tmp_path / "e"))
    check_answer(summary["answer"])
    result = validate_entry(tmp_path / "e")
    short, long = (
        row_of(result, "ttft", tokens=tokens, mini_batches=1)["ttft_s"]
        for tokens in (16, 128)
    )
    assert 0.5 < short < long < 3.15  # the paper's, with software
    layer = row_of(result, "layer", tokens=16)
    assert short > 32 * layer["load_ms"] * 1e-3
