"""The default model's tasks: what is counted, what is refused, and a run of a few."""

from pathlib import Path

import numpy as np
import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows, plain, tables
from moe_edge.metrics.page import render
from moe_edge.metrics.schema import read_result
from moe_edge.studies.composition.quality import questions
from moe_edge.studies.default_model.answers import told
from moe_edge.studies.default_model.tasks import (
    FRAMES,
    RESIDENT,
    STUDY,
    TaskSettings,
    derive,
)
from moe_edge.training.generators import FAMILIES

ENTRY = Path(__file__).parents[3] / "results" / "default_tasks"


def test_questions_are_of_all_families_and_another_study_has_others():
    found = questions(3, 0, of="a")
    assert [one.family for one in found] == [f for f in FAMILIES for _ in range(3)]
    assert all(one.prompt.endswith("Answer:") for one in found)
    assert found == questions(3, 0, of="a") and found != questions(3, 0, of="b")


def test_changes_are_of_pairs():
    own_Q = np.array([True] * 50 + [False] * 50)
    right_Q = np.array([True] * 40 + [False] * 60)  # ten of the same questions lost
    found = told("SMoE", right_Q, own_Q)["change"]
    assert found.value == pytest.approx(-0.1)
    assert found.low == pytest.approx(-0.1 - 1.96 * 0.3 / np.sqrt(99))
    assert set(told(RESIDENT, own_Q, own_Q)) == {"right"}
    share = told(RESIDENT, own_Q, own_Q)["right"]
    assert share.low < share.value == 0.5 < share.high


def test_the_bar_is_three_families():
    rows = Rows(FRAMES)
    for number, family in enumerate(FAMILIES):
        rows("answers", family, RESIDENT, right=0.5 if number < 3 else 0.1)
        rows("answers", family, "SMoE", right=0.9, change=0.1)
    assert [*derive(tables(rows.stored()))["checks"].values()] == [True]
    rows.rows["answers"][0]["right"] = 0.49
    assert [*derive(tables(rows.stored()))["checks"].values()] == [False]


def test_as_many_experts_as_the_model_chooses_are_refused():
    with pytest.raises(ConfigError, match="k is 8, and default chooses 8 experts"):
        STUDY.check(TaskSettings(k=8))


@pytest.mark.slow
def test_the_study_asks_all_alike(tmp_path):
    settings = TaskSettings(questions=4, margins=(0.6,))
    run_study(STUDY, settings, out_dir=str(tmp_path / "o"), allow_dirty=True)
    found = tables(read_result(tmp_path / "o")["frames"])["answers"]
    whats = [RESIDENT, "3 of 8 experts", "SMoE, a = 0.6"]
    assert found.what.tolist() == [w for w in whats for _ in FAMILIES]
    assert (found.right_n == 4).all() and found.right.between(0, 1).all()


def test_a_page_says_what_changes_mean_for_the_model_that_was_asked():
    result = read_result(ENTRY)
    page, _ = render("default_tasks", result)
    assert "it answers a part" in page and "families mostly" not in page
    answers = result["frames"]["answers"]
    place = len(answers["keys"]) + list(answers["units"]).index("right")
    for row in answers["rows"]:
        if row[0] != "arithmetic":
            row[place] = [0.9, 1000, 0.88, 0.92]
    result["numbers"] = plain(derive(tables(result["frames"])))
    page, _ = render("default_tasks", result)
    assert "It solves 3 of 4 families mostly" in page
    assert "it answers a part" not in page
