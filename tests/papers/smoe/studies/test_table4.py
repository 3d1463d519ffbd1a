import json

import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.evaluate.multiple_choice import Question, short_questions
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.smoe.studies.table4 import (
    STUDY,
    AccuracySettings,
    answer_of,
    by_task,
    plot,
    table_of,
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
    one, two, together = by_task(tasks, 0.2, lines, reference)
    assert (one["accuracy"], one["same_answer"], one["n"]) == (1.0, 1.0, 1)
    assert (two["accuracy"], two["same_answer"], two["chance"]) == (0.5, 0.5, 0.5)
    assert together["task"] == "all sets" and together["n"] == 3
    assert together["accuracy"] == together["same_answer"] == pytest.approx(2 / 3)


def rows_of(task, values):
    return [
        {"task": task, "a": a, "n": 9, "accuracy": sum(interval) / 2,
         "interval95": interval, "chance": 0.5, "same_answer": 0.9}
        for a, interval in values
    ]  # fmt: skip


def test_verdict_names_the_first_a_that_differs():
    near = rows_of("x", [(0.0, (0.45, 0.6)), (0.3, (0.55, 0.7))])
    assert verdict_of(near) == "not informative, at chance"
    far = rows_of("x", [(0.0, (0.7, 0.8)), (0.3, (0.69, 0.75)), (0.6, (0.5, 0.69))])
    assert verdict_of(far) == "differs from a = 0 from a = 0.6 on"


def test_answer_table_and_picture_say_what_is_not_informative(tmp_path):
    values = [(0.0, (0.45, 0.6)), (0.3, (0.55, 0.7))]
    accuracy = rows_of("x", values) + rows_of("all sets", values)
    fidelity = [
        {"a": a, "agreement": 0.75, "perplexity_ratio": 1.25, "changed_ratio": 0.5}
        for a in (0.0, 0.3)
    ]
    answer, details = answer_of(accuracy, fidelity)
    assert "1 of 1 sets are not informative" in answer and "x1.250" in details[-1]
    table = table_of(accuracy, fidelity)
    assert "| x | 9 | 50.0 | 52.5 ± 7.5 | 62.5 ± 7.5 | not informative" in table
    assert "| agreement on text |  |  | 75.0 | 75.0 |" in table
    for row in fidelity:
        row |= {"agreement_interval95": (0.7, 0.8), "ratio_interval95": (1.2, 1.3)}
    plot(tmp_path / "p.png", accuracy, fidelity)
    assert (tmp_path / "p.png").stat().st_size > 10_000


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
    assert [row["a"] for row in summary["fidelity"]] == [0.0, 0.6]
    assert summary["fidelity"][1]["changed_ratio"] > 0
    source = result["workload"]["sets"]["q.jsonl"]
    assert source["questions"] == 2 and len(source["sha256"]) == 64
    assert "| q | 2 | 50.0 |" in (tmp_path / "o" / "table.md").read_text()


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
