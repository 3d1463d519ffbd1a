"""Exact match of the task families: what perplexity on prose does not show."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.progress import progress
from moe_edge.engine.generate import generate
from moe_edge.training.generators import FAMILIES, examples

BATCH, NEW_TOKENS = 8, 16


class Question(NamedTuple):
    """A solved example and a question, and the right answer."""

    family: str
    prompt: str
    answer: str


def questions(count: int, seed: int, of: str = "composition") -> list[Question]:
    """So many of each family, from a seed that training and calibration never used.

    Args:
      of: the study, which has questions of its own.
    """
    found = []
    for family in FAMILIES:
        both = examples(family, f"{of}-{seed}", 2 * count)
        for solved, asked in zip(both[::2], both[1::2], strict=True):
            prompt = (
                f"{solved.question}\nAnswer: {solved.answer}\n\n"
                f"{asked.question}\nAnswer:"
            )
            found.append(Question(family, prompt, asked.answer))
    return found


def exact_match(engine, tokenizer: Tokenizer, asked: Sequence[Question]) -> float:
    """Share of the questions that are answered rightly."""
    return float(answered(engine, tokenizer, asked).mean())


def answered(engine, tokenizer: Tokenizer, asked: Sequence[Question]) -> np.ndarray:
    """bool [questions]: whether the answer, up to the line's end, is the right one."""
    ids = [tokenizer.encode(question.prompt, end=False) for question in asked]
    order = sorted(range(len(asked)), key=lambda i: len(ids[i]))
    right_Q = np.zeros(len(asked), bool)
    for first in progress(range(0, len(order), BATCH), "batches of questions"):
        part = order[first : first + BATCH]
        run = generate(engine, [ids[i] for i in part], NEW_TOKENS)
        for i, tokens in zip(part, run.tokens, strict=True):
            line = tokenizer.decode(tokens).split("\n", 1)[0]
            right_Q[i] = line.strip() == asked[i].answer
    return right_Q
