import json

import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.evaluate.agreement import Agreement
from moe_edge.evaluate.multiple_choice import Question, short_questions
from moe_edge.metrics.frames import Rows, tables
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.smoe.studies.table4 import (
    ALL,
    STUDY,
    AccuracySettings,
    by_task,
    derive,
    tell_answers,
    tell_text,
    verdict_of,
)
from tests.support.table_engine import LetterTokenizer
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint


def write_questions(path, prompts):
    choices = ["12 sacks", "3"]
    rows = [
        {"id": f"q/{i}", "prompt": prompt, "choices": choices, "answer_index": i % 2}
        for i, prompt in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def line(chosen, answer):
    return {"chosen_index": chosen, "answer_index": answer}


def test_by_task_splits_lines_by_set_and_adds_them_up():
    question = Question("q", "p", ("a", "b"), 0)
    tasks = {"one": [question], "two": [question, question]}
    lines = [line(0, 0), line(1, 0), line(0, 0)]
    reference = [line(0, 0), line(1, 0), line(1, 0)]
    one, two, together = by_task(tasks, lines, reference)
    assert (one["accuracy"], one["same_answer"], one["n"]) == (1.0, 1.0, 1)
    assert (two["accuracy"], two["same_answer"], two["chance"]) == (0.5, 0.5, 0.5)
    assert together["task"] == "all sets" and together["n"] == 3
    assert together["accuracy"] == together["same_answer"] == pytest.approx(2 / 3)


def rows_of(rows, values, a, task="x"):
    line = {"task": task, "n": 9, "chance": 0.5, "same_answer": 0.9}
    line |= {"accuracy": sum(values) / 2, "interval95": values}
    tell_answers(rows, a, [line | {"same_interval95": (0.8, 1.0)}])


def answers_of(*values):
    rows = Rows(STUDY.frames)
    for a, interval in values:
        rows_of(rows, interval, a)
    return tables(rows.stored())["answers"]


def test_verdict_names_the_first_a_that_differs():
    near = answers_of((0.0, (0.45, 0.6)), (0.3, (0.55, 0.7)))
    assert verdict_of(near) == "not informative, at chance"
    far = answers_of((0.0, (0.7, 0.8)), (0.3, (0.69, 0.75)), (0.6, (0.5, 0.69)))
    assert verdict_of(far) == "differs from a = 0 from a = 0.6 on"


def test_derive_says_what_is_not_informative_and_checks_a_zero():
    rows = Rows(STUDY.frames)
    run = Agreement(100, 1.0, (0.9, 1.0), 1.25, (1.2, 1.3), 7.0, 0.5)
    for a, values in ((0.0, (0.45, 0.6)), (0.3, (0.55, 0.7))):
        rows_of(rows, values, a)
        rows_of(rows, values, a, ALL)
        tell_text(rows, a, run, 0.5)
    found = derive(tables(rows.stored()))
    assert (found["silent"], found["num_sets"]) == (1, 1)
    assert found["last"]["perplexity_ratio"] == 1.25 and found["last"]["a"] == 0.3
    assert list(found["verdicts"].verdict) == ["not informative, at chance"] * 2
    assert list(map(bool, found["checks"].values())) == [False, True]


def test_short_questions_skips_long_ones(tmp_path):
    path = write_questions(tmp_path / "q.jsonl", ["x" * 50, "How", "What", "Who"])
    found = short_questions(LetterTokenizer(), path, 2, 20)
    assert [question.prompt for question in found] == ["How", "What"]
    with pytest.raises(RequestError, match="q.jsonl has no question of at most 5 tok"):
        short_questions(LetterTokenizer(), path, 2, 5)


@pytest.mark.slow
def test_study_writes_an_entry_and_a_zero_is_exact(tmp_path):
    tiny = write_tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "t.txt").write_text(TEXT * 3)
    write_questions(tmp_path / "q.jsonl", ["How many", "Who counts", "Is it"])
    settings = AccuracySettings(
        checkpoint=str(tiny),
        data_dir=str(tmp_path),
        sets=("q.jsonl",),
        limit=2,
        a_values=(0.6,),
        device_memory="50%",
        batch_size=2,
        text="t.txt",
        rows=2,
        prompt_tokens=4,
        forced_tokens=12,
    )
    summary = run_study(STUDY, settings, out_dir=str(tmp_path / "o"))
    result = validate_entry(tmp_path / "o")
    assert all(result["checks"].values()) and len(result["checks"]) == 2
    over_a = summary["numbers"]["over_a"]
    assert [row["a"] for row in over_a] == [0.0, 0.6]
    assert over_a[1]["changed_ratio"] > 0
    source = result["workload"]["sets"]["q.jsonl"]
    assert source["questions"] == 2 and len(source["sha256"]) == 64
    assert "q (2 questions, chance 50%)" in (tmp_path / "o" / "README.md").read_text()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"a_values": (1.0,)}, "a_values must lie in .0, 1., got 1"),
        ({"limit": 0}, "limit must be a positive whole number, got 0"),
    ],
)
def test_settings_refuse(given, message):
    with pytest.raises(ConfigError, match=message):
        AccuracySettings(**given)
