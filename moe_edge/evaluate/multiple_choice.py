"""Multiple-choice accuracy by length-normalised log-likelihood.

The text of a choice is the prompt, one space, the choice. Its tokens are those of
that whole text beyond the longest common prefix with the tokens of the prompt
alone, so a tokenizer that joins the space to the next word is treated fairly; an end
token that a tokenizer adds is left out of both. The
sum of their log-probabilities is divided by the choice's UTF-8 bytes; the highest
wins, the first of equals. A text longer than the context loses its left end.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.core.json_reader import json_objects
from moe_edge.engine.prompts import check_keys
from moe_edge.evaluate.likelihood import Forced, score_rows

QUESTION_KEYS = ("id", "task", "prompt", "choices", "answer_index", "meta")


@dataclasses.dataclass(frozen=True)
class Question:
    """One question in the `mcq` schema."""

    id: str
    prompt: str
    choices: tuple[str, ...]
    answer: int

    @property
    def texts(self) -> list[str]:
        """What is scored: the prompt with each choice."""
        return [f"{self.prompt} {choice}" for choice in self.choices]


@dataclasses.dataclass(frozen=True)
class Continuation(Forced):
    """Tokens of prompt and choice; those of the choice are scored."""

    truncated: bool


def parse_question(where: str, row: dict[str, Any]) -> Question:
    """Checks one line of a file.

    Raises:
      RequestError: names the line and the field.
    """
    check_keys(where, row, QUESTION_KEYS)
    for key in ("id", "prompt"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise RequestError(f"{where}: {key!r} is {row.get(key)!r}, expected a text")
    choices, answer = row.get("choices"), row.get("answer_index")
    if not isinstance(choices, list) or len(choices) < 2:
        raise RequestError(
            f"{where}: 'choices' is {choices!r}, expected a list of two or more texts"
        )
    if any(not isinstance(choice, str) or not choice for choice in choices):
        raise RequestError(f"{where}: a choice is empty or no text: {choices!r}")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise RequestError(
            f"{where}: 'answer_index' is {answer!r}, expected 0..{len(choices) - 1}"
        )
    return Question(row["id"], row["prompt"], tuple(choices), answer)


def read_questions(paths: Sequence[str], limit: int | None = None) -> list[Question]:
    """Questions of JSON-lines files; at most `limit` of each file.

    Raises:
      RequestError: a bad line, or a file that has no questions or cannot be read.
    """
    questions = []
    for path in paths:
        rows = [
            parse_question(where, row)
            for where, row in json_objects(path, RequestError)
        ]
        if not rows:
            raise RequestError(f"{path} holds no questions")
        questions += rows[:limit]
    return questions


def token_counts(tokenizer: Tokenizer, questions: Sequence[Question]) -> list[int]:
    """Tokens of every text of all questions."""
    return [
        len(tokenizer.encode(text, end=False))
        for question in questions
        for text in question.texts
    ]


def short_questions(
    tokenizer, path: str, limit: int, max_tokens: int
) -> list[Question]:
    """The first questions of a file whose every text has at most `max_tokens` tokens.

    Raises:
      RequestError: the file has none.
    """
    found = []
    for question in read_questions([path]):
        if max(token_counts(tokenizer, [question])) <= max_tokens:
            found.append(question)
        if len(found) == limit:
            break
    if not found:
        raise RequestError(f"{path} has no question of at most {max_tokens} tokens")
    return found


def encode_choice(
    tokenizer: Tokenizer, prompt: str, choice: str, max_positions: int
) -> Continuation:
    """Tokens of prompt and choice, and where the choice begins.

    Raises:
      CapacityError: the choice alone fills the context.
    """
    prompt_ids = tokenizer.encode(prompt, end=False)
    ids = tokenizer.encode(f"{prompt} {choice}", end=False)
    common = len(os.path.commonprefix([prompt_ids, ids]))
    first = max(1, min(common, len(ids) - 1))  # the very first token has no context
    if len(ids) - first >= max_positions:
        raise CapacityError(
            f"choice {choice[:40]!r} has {len(ids) - first} tokens, the model's "
            f"context {max_positions}, which must hold some of the prompt too"
        )
    cut = max(0, len(ids) - max_positions)
    return Continuation(ids[cut:], first - cut, cut > 0)


def score_continuations(
    engine, items: Sequence[Continuation], batch_size: int
) -> np.ndarray:
    """Summed log-probability of every continuation, float64."""
    found = score_rows(engine, items, batch_size, read_last=True)
    return np.asarray([log_prob for log_prob, _ in found])


def wilson_interval(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a share. Source: Wilson, JASA 22 (1927)."""
    from scipy.stats import binomtest  # half a second, which --help need not wait for

    found = binomtest(right, n).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def answer_questions(
    engine,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    batch_size: int = 16,
    score=score_continuations,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Answers all questions; `score` may run the choices in another way.

    Returns:
      (summary, lines): accuracy, n, its 95 % interval, the accuracy of guessing and
      how many texts were cut; per question the chosen index and the scores.
    """
    limit = engine.config.max_positions
    items = [
        encode_choice(tokenizer, question.prompt, choice, limit)
        for question in questions
        for choice in question.choices
    ]
    sums = score(engine, items, batch_size)
    lines, start = [], 0
    for question in questions:
        end = start + len(question.choices)
        num_bytes = [len(choice.encode("utf-8")) for choice in question.choices]
        scores = sums[start:end] / np.asarray(num_bytes)
        lines.append(
            {
                "id": question.id,
                "answer_index": question.answer,
                "chosen_index": int(np.argmax(scores)),
                "nats_per_byte": scores.tolist(),
                "truncated": any(item.truncated for item in items[start:end]),
            }
        )
        start = end
    truncated = sum(line["truncated"] for line in lines)
    return accuracy_of(questions, lines) | {"truncated": truncated}, lines


def accuracy_of(
    questions: Sequence[Question], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Share of right answers, of how many, its 95 % interval, that of guessing."""
    right = sum(line["chosen_index"] == line["answer_index"] for line in lines)
    return {
        "accuracy": right / len(lines),
        "n": len(lines),
        "interval95": list(wilson_interval(right, len(lines))),
        "chance": float(np.mean([1 / len(q.choices) for q in questions])),
    }
