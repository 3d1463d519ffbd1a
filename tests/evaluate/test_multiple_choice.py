import json

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.evaluate.multiple_choice import (
    Question,
    answer_questions,
    encode_choice,
    parse_question,
    read_questions,
    wilson_interval,
)
from tests.support.table_engine import LetterTokenizer, TableEngine

GOOD = {"id": "q/1", "prompt": "a", "choices": ["b", "c"], "answer_index": 1}


def letter_engine(**kwargs):
    return TableEngine(vocab_size=len(LetterTokenizer(["a "]).tokens), **kwargs)


def test_encode_choice_continuation_starts_with_the_space():
    item = encode_choice(LetterTokenizer(), "ab", "cd", 64)
    assert (len(item.ids), item.first, item.truncated) == (5, 2, False)


def test_encode_choice_merge_over_the_border_scores_the_merged_token():
    # "a " is one token: the prompt's last token changes, so the prefix ends before.
    item = encode_choice(LetterTokenizer(["a "]), "ba", "c", 64)
    assert (len(item.ids), item.first) == (3, 1)


def test_encode_choice_without_common_prefix_skips_the_first_token():
    item = encode_choice(LetterTokenizer(["a "]), "a", "c", 64)
    assert (len(item.ids), item.first) == (2, 1)


def test_encode_choice_scores_no_end_token():
    want = encode_choice(LetterTokenizer(), "ab", "cd", 64)
    assert encode_choice(LetterTokenizer(adds_end=True), "ab", "cd", 64) == want


def test_encode_choice_long_prompt_loses_its_left_end():
    whole = encode_choice(LetterTokenizer(), "abcdefgh", "xy", 64)
    item = encode_choice(LetterTokenizer(), "abcdefgh", "xy", 6)
    assert item.ids == whole.ids[-6:]
    assert (item.first, item.truncated) == (3, True)


def test_encode_choice_rejects_choice_that_fills_the_context():
    with pytest.raises(CapacityError, match="'wxyz' has 5 tokens, .* context 5"):
        encode_choice(LetterTokenizer(), "ab", "wxyz", 5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_answer_questions_matches_reference(batch_size):
    engine, tokenizer = letter_engine(), LetterTokenizer()
    questions = [
        Question("q/0", "how", ("a", "bcd", "ef"), 0),
        Question("q/1", "a longer prompt", ("yes", "no"), 1),
        Question("q/2", "x", ("1", "22"), 0),
    ]
    summary, lines = answer_questions(engine, tokenizer, questions, batch_size)
    right = 0
    for question, line in zip(questions, lines, strict=True):
        scores = []
        for choice in question.choices:
            ids = tokenizer.encode(f"{question.prompt} {choice}")
            first = len(question.prompt)
            total = sum(
                engine.log_prob(ids[i - 1], ids[i]) for i in range(first, len(ids))
            )
            scores.append(total / len(choice))
        np.testing.assert_allclose(line["nats_per_byte"], scores, rtol=1e-5)
        assert line["chosen_index"] == int(np.argmax(scores))
        right += line["chosen_index"] == question.answer
    assert summary["accuracy"] == right / 3
    assert summary["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    assert summary["truncated"] == 0


def test_answer_questions_divides_by_utf8_bytes():
    tokenizer = LetterTokenizer(["é"])
    tokenizer.tokens.append("é")
    engine = TableEngine(vocab_size=len(tokenizer.tokens))
    _, lines = answer_questions(engine, tokenizer, [Question("q", "a", ("é", "b"), 0)])
    a, space, e = (tokenizer.tokens.index(c) for c in "a é")
    total = engine.log_prob(a, space) + engine.log_prob(space, e)
    assert lines[0]["nats_per_byte"][0] == pytest.approx(total / 2, rel=1e-5)


def test_wilson_interval_golden():
    # 8 of 10, from Wilson's formula with z = 1.959964.
    assert wilson_interval(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson_interval(0, 5)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson_interval(5, 5)[1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": ""}, "f:3: 'prompt' is '', expected a text"),
        ({"id": 7}, "f:3: 'id' is 7, expected a text"),
        ({"choices": ["b"]}, r"f:3: 'choices' is \['b'\]"),
        ({"choices": ["b", ""]}, "f:3: a choice is empty"),
        ({"choices": ["b", 3]}, "f:3: a choice is empty or no text"),
        ({"answer_index": 2}, "f:3: 'answer_index' is 2, expected 0..1"),
        ({"answer_index": "0"}, "f:3: 'answer_index' is '0'"),
        ({"answer_index": True}, "f:3: 'answer_index' is True"),
        (
            {"answer": 1},
            "f:3: unknown key 'answer'; did you mean 'answer_index'. known: id",
        ),
    ],
)
def test_parse_question_rejects_bad_field(change, message):
    with pytest.raises(RequestError, match=message):
        parse_question("f:3", GOOD | change)


def test_read_questions_limits_each_file(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps(GOOD | {"id": f"q/{i}"}) for i in range(5)))
    found = read_questions([str(path), str(path)], 2)
    assert [question.id for question in found] == ["q/0", "q/1"] * 2


def test_read_questions_rejects_empty_file(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n")
    with pytest.raises(RequestError, match="q.jsonl holds no questions"):
        read_questions([str(path)])
