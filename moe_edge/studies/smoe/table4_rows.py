"""Rows of the study of accuracy over a: questions, counts, metrics."""

from typing import Any

from moe_edge.core.checks import RequestError
from moe_edge.evaluate.multiple_choice import (
    Question,
    read_questions,
    wilson_interval,
)
from moe_edge.metrics.results import metric

ALL = "all sets"


def short_questions(
    tokenizer, path: str, limit: int, max_tokens: int
) -> list[Question]:
    """The first questions of a file whose every text has at most `max_tokens` tokens.

    Raises:
      RequestError: the file has none.
    """
    found = []
    for question in read_questions([path]):
        texts = [f"{question.prompt} {choice}" for choice in question.choices]
        if all(len(tokenizer.encode(text)) <= max_tokens for text in texts):
            found.append(question)
        if len(found) == limit:
            break
    if not found:
        raise RequestError(f"{path} has no question of at most {max_tokens} tokens")
    return found


def summarise(task: str, a: float, questions, lines, reference) -> dict[str, Any]:
    """Accuracy of some questions, and how many are answered as the reference does."""
    n = len(lines)
    right = sum(line["chosen_index"] == line["answer_index"] for line in lines)
    same = sum(
        line["chosen_index"] == other["chosen_index"]
        for line, other in zip(lines, reference, strict=True)
    )
    return {
        "task": task,
        "a": a,
        "n": n,
        "accuracy": right / n,
        "interval95": wilson_interval(right, n),
        "chance": sum(1 / len(q.choices) for q in questions) / n,
        "same_answer": same / n,
        "same_interval95": wilson_interval(same, n),
    }


def by_task(tasks: dict[str, list[Question]], a: float, lines, reference) -> list[dict]:
    """`summarise` of every set and of all together; lines in the order of the sets."""
    rows, start = [], 0
    for task, questions in tasks.items():
        part = slice(start, start := start + len(questions))
        rows.append(summarise(task, a, questions, lines[part], reference[part]))
    questions = [question for part in tasks.values() for question in part]
    return [*rows, summarise(ALL, a, questions, lines, reference)]


def metric_rows(accuracy, fidelity) -> list[dict]:
    """All sets together at every a; each set is in table.md."""
    together = [row for row in accuracy if row["task"] == ALL]
    rows = []
    for row, found in zip(together, fidelity, strict=True):
        for name, source, key, interval, n in (
            ("accuracy", row, "accuracy", "interval95", row["n"]),
            ("same answer", row, "same_answer", "same_interval95", row["n"]),
            (
                "agreement on text", found, "agreement", "agreement_interval95",
                found["tokens"],
            ),
            (
                "perplexity ratio on text", found, "perplexity_ratio",
                "ratio_interval95", found["tokens"],
            ),
        ):  # fmt: skip
            low, high = source[interval]
            spread = ("half of the 95 % interval", (high - low) / 2)
            what = f"substitute a={row['a']:g}"
            rows.append(metric(what, name, source[key], "1", n, spread))
    return rows
