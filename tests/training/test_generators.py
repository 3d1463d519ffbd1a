"""Generated tasks: right answers, and the same text for the same seed."""

import random
import re

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.training import generators


@pytest.mark.parametrize("family", generators.FAMILIES)
def test_examples_same_seed_gives_same_list_and_other_seed_another(family):
    one = generators.examples(family, "a", 50)
    assert one == generators.examples(family, "a", 50)
    assert one != generators.examples(family, "b", 50)
    assert all(e.question and e.answer and "\n" not in e.answer for e in one)


def test_arithmetic_answers_hold():
    signs = {
        "+": int.__add__,
        "-": int.__sub__,
        "*": int.__mul__,
        "/": int.__floordiv__,
    }
    checked = 0
    for question, answer in generators.examples("arithmetic", 0, 600):
        if found := re.fullmatch(r"(\d+) ([-+*/]) (\d+) =", question):
            assert int(answer) == signs[found[2]](int(found[1]), int(found[3]))
            checked += 1
    assert checked > 50


def test_words_answers_hold():
    checked = 0
    for question, answer in generators.examples("words", 0, 600):
        if question.startswith("Sort by alphabet: "):
            assert answer.split() == sorted(question.split(": ")[1].split())
            checked += 1
        if question.startswith("Reverse the letters: "):
            assert answer == question.split(": ")[1][::-1]
            checked += 1
    assert checked > 50


@pytest.mark.parametrize("family", ["stories", "tables"])
def test_answer_of_look_up_stands_in_the_text(family):
    for question, answer in generators.examples(family, 0, 200):
        if "How many rows" in question:
            continue
        words = answer.replace("in the ", "").replace("a ", "", 1).split()
        assert all(word in question for word in words)


def test_documents_hold_questions_and_answers_of_the_asked_length():
    texts = generators.documents("stories", 1, 5000)
    assert 5000 <= sum(map(len, texts)) < 8000
    assert all("\nAnswer: " in text for text in texts)


def test_words_example_does_not_touch_global_randomness():
    state = random.getstate()
    generators.examples("words", 0, 5)
    assert random.getstate() == state


def test_examples_reject_unknown_family():
    with pytest.raises(ConfigError, match="unknown task family 'riddles'; known: arit"):
        generators.examples("riddles", 0, 1)
