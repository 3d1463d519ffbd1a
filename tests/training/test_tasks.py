"""Rows of tasks: whose tokens are learnt, and seeds that nothing else uses."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer

from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.core.checks import ConfigError
from moe_edge.training import tasks
from moe_edge.training.exercises import EXERCISES, copies
from moe_edge.training.generators import FAMILIES, READINGS, Example, examples


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))


def learnt(tokenizer, rows, weights) -> list[list[str]]:
    """Of each row, the stretches of text that have weight as targets."""
    found = []
    for ids, learns in zip(rows[:, 1:], weights > 0, strict=True):
        edges = np.flatnonzero(np.diff(learns, prepend=False, append=False))
        pairs = zip(edges[::2], edges[1::2], strict=True)
        found.append([tokenizer.decode(ids[a:b].tolist()) for a, b in pairs])
    return found


def test_a_document_marks_answers_with_their_space_and_the_end_of_their_line(tokenizer):
    document = tasks.Document()
    document.add(Example("3 + 4 =", "7"))
    document.add(Example("Where was the key found?", "in the barn"))
    assert document.text == (
        "3 + 4 =\nAnswer: 7\n\nWhere was the key found?\nAnswer: in the barn\n\n"
    )
    ids, answers = document.encode(tokenizer)
    assert ids == tokenizer.encode(document.text).ids
    pairs = list(zip(ids, answers, strict=True))
    first, second = ([token for token, a in pairs if a == n] for n in (1, 2))
    assert tokenizer.decode(first) == " 7\n"
    assert tokenizer.decode(second).rstrip("\n") == " in the barn"


@pytest.mark.parametrize("family", FAMILIES | EXERCISES)
def test_a_row_learns_each_answer_and_nothing_else(tokenizer, family):
    rows, weights = tasks.TaskRows(tokenizer, {family: 1}, 0).next_batch(2, 256)
    assert rows.shape == (4, 257) and weights.shape == (4, 256)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)  # rows weigh alike
    texts = [tokenizer.decode(row.tolist()) for row in rows]
    for text, answers in zip(texts, learnt(tokenizer, rows, weights), strict=True):
        lines = text.split("\n")
        whole = lines[:-1]  # the last line may be cut
        given = [line.removeprefix("Answer:") for line in whole if "Answer:" in line]
        assert len(given) > 2
        assert [answer.rstrip("\n") for answer in answers[: len(given)]] == given
        assert len(answers) <= len(given) + 1


def test_a_text_is_asked_several_different_questions():
    drawn = tasks._examples("stories", random.Random(0))
    questions = [next(drawn).question for _ in range(200)]
    texts = [n for n, question in enumerate(questions) if "\n" in question]
    asked = np.diff(texts)
    assert asked.min() == 1 and 4 < asked.max() <= tasks.MOST_ASKED
    for first, end in zip(texts, texts[1:], strict=False):
        of_one = [question.split("\n")[-1] for question in questions[first:end]]
        assert len(set(of_one)) == len(of_one)


def test_rows_are_those_of_the_mix_and_go_on_where_they_stopped(tokenizer):
    mix = {"words": 1, "stories": 3}
    whole, resumed, other = (tasks.TaskRows(tokenizer, mix, s) for s in (5, 5, 6))
    batches = [whole.next_batch(1, 128) for _ in range(3)]
    families = [whole.family(n) for n in range(12)]
    assert families.count("stories") == 9 and families[:4].count("words") == 1
    resumed.skip_to(8)
    for one, two in zip(resumed.next_batch(1, 128), batches[2], strict=True):
        np.testing.assert_array_equal(one, two)
    assert resumed.position == whole.position == 12
    assert (other.next_batch(1, 128).rows != batches[0].rows).any()
    seen = {row.tobytes() for batch in batches for row in batch.rows}
    assert len(seen) == 12


def test_held_out_questions_have_weight_on_the_second_answer_alone(tokenizer):
    batch = tasks.held_out_questions(tokenizer, "tables", 0, 8)
    both = examples("tables", "taught-held-out-0", 16)
    assert (batch.rows.shape[1] - 1) % 64 == 0
    for asked, answers in zip(both[1::2], learnt(tokenizer, *batch), strict=True):
        assert [answer.rstrip("\n") for answer in answers] == [f" {asked.answer}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_held_out_question_is_asked_as_studies_ask_it(tokenizer, family):
    batch = tasks.held_out_questions(tokenizer, family, 3, 4)
    both = examples(family, "taught-held-out-3", 8)
    pairs = zip(both[::2], both[1::2], strict=True)
    for ids, learns, (solved, asked) in zip(*batch, pairs, strict=True):
        prompt = (
            f"{solved.question}\nAnswer: {solved.answer}\n\n{asked.question}\nAnswer:"
        )
        begin = 1 + int(np.flatnonzero(learns)[0])
        assert ids[:begin].tolist() == tokenizer.encode(prompt).ids


def test_no_study_and_no_pretraining_draws_from_the_seeds_of_rows(monkeypatch):
    """Questions of studies, of pretraining, held out and taught ones: other seeds."""
    from moe_edge.studies.composition.quality import questions

    seeds = {}

    def noted(who):
        def draw(rng):
            seeds.setdefault(who, set()).add(rng.getrandbits(64))
            return Example("q", "a")

        return dict.fromkeys(FAMILIES, draw)

    raw = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    for who in ("taught", "held out", "default-tasks", "composition", "pretraining"):
        for module in ("tasks", "generators"):
            monkeypatch.setattr(f"moe_edge.training.{module}.FAMILIES", noted(who))
        monkeypatch.setattr("moe_edge.training.tasks.READINGS", {})
        for seed in range(3):
            if who == "taught":
                tasks.TaskRows(raw, dict.fromkeys(FAMILIES, 1), seed).next_batch(1, 64)
            elif who == "held out":
                for family in FAMILIES:
                    tasks.held_out_questions(raw, family, seed, 2)
            elif who == "pretraining":
                for part, family in (
                    (p, f) for p in ("train", "held-out") for f in FAMILIES
                ):
                    examples(family, f"{part}-{seed}", 2)
            else:
                questions(2, seed, of=who)
    drawn = list(seeds.values())
    assert len(drawn) == 5
    assert sum(map(len, drawn)) == len(set().union(*drawn))


def test_answers_of_copies_stand_in_their_questions():
    rng = random.Random(0)
    for _ in range(100):
        question, answer = copies(rng)
        asked = question.replace(",", "").split()
        assert set(answer.replace(",", "").split()) <= set(asked)


def test_exercises_are_no_families():
    assert not EXERCISES.keys() & FAMILIES.keys()


def test_readings_are_families():
    assert set(READINGS) < set(FAMILIES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("storis=1", "unknown task family 'storis'.*stories"),
        ("copies=2", "mix has 'copies=2' alone, expected a task family, too"),
        ("stories", "mix has 'stories', expected FAMILY=ROWS with 1 to 100 rows"),
        ("stories=0", "mix has 'stories=0', expected FAMILY=ROWS"),
        ("stories=1,stories=2", "mix names stories twice"),
        ("", "unknown task family ''"),
    ],
)
def test_a_mix_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        tasks.parse_mix(text)


def test_a_mix_is_read():
    assert tasks.parse_mix("stories=3, tables=1") == {"stories": 3, "tables": 1}
