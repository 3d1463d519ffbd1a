"""Prompts of studies, and the sizes that every study refuses."""

import pytest

from moe_edge.bench import prompts
from moe_edge.bench.prompts import PromptSettings, make_pool, prompt_files
from moe_edge.bench.started import started
from moe_edge.bench.study import mean_change
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.papers.smoe.studies.fig14 import BudgetSettings


class Words:
    """A tokenizer of one id a word."""

    def encode(self, text, begin=True, end=True):
        return [len(word) for word in text.split()]


class Wrapped(Words):
    """Puts 100 before a text and 200 after it."""

    def encode(self, text, begin=True, end=True):
        return [100] * begin + super().encode(text) + [200] * end


def test_settings_bad_value_is_refused():
    for changes, message in (
        ({"rounds": 0}, "rounds must be a positive whole number, got 0"),
        ({"batches": ()}, r"batches is \(\), expected a list of at least one"),
        ({"batches": (0,)}, "batches must be a positive whole number, got 0"),
        ({"budgets": "25%"}, "budgets is '25%', expected a list"),
        ({"budgets": ("25",)}, "device memory '25' is no budget"),
        ({"new_tokens": 1}, "new_tokens is 1, expected at least 2"),
        ({"a": 1.0}, r"a must lie in \[0, 1\), got 1.0"),
        ({"link_factor": 0.0}, "link_factor must be positive, got 0.0"),
        ({"history": 0}, "history must be a positive whole number, got 0"),
        ({"fidelity_rows": 0}, "fidelity_rows must be a positive whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            BudgetSettings(**changes)


def test_mean_change_leaves_out_what_starts_from_zero():
    assert mean_change([(2, 1), (4, 6), (0, 5)]) == 0.0
    assert mean_change([(2, 1), (0, 5)]) == -0.5
    assert mean_change([(0, 5)]) == 0.0


def write_sources(folder):
    rows = ("one two three four", "too short", "a bb ccc dddd eeeee")
    lines = [f'{{"id": "{i}", "prompt": "{row}"}}' for i, row in enumerate(rows)]
    (folder / "p.jsonl").write_text("\n".join(lines))
    (folder / "t.txt").write_text("xxxxxx " * 40)
    return PromptSettings(data_dir=str(folder), sources=("p.jsonl", "t.txt"))


def test_pool_takes_files_in_turn_and_skips_short_prompts(tmp_path):
    pool = make_pool(write_sources(tmp_path), Words(), 4, 3)
    assert list(pool.rows) == [[3, 3, 5], [6, 6, 6], [1, 2, 3], [6, 6, 6]]
    assert [source["path"] for source in pool.sources] == ["p.jsonl", "t.txt"]
    assert all(len(source["sha256"]) == 64 for source in pool.sources)
    assert pool.batches([1, 2]) == [[[3, 3, 5]], [[6, 6, 6], [1, 2, 3]]]


def test_questions_are_prompts_too_and_other_keys_are_refused(tmp_path):
    """As in the data's `mcq/boolq.jsonl`, which studies read by default."""
    line = '{"id": "q", "prompt": "one two three", "choices": ["a"], "%s": 0}'
    settings = PromptSettings(data_dir=str(tmp_path), sources=("q.jsonl",))
    (tmp_path / "q.jsonl").write_text(line % "answer_index")
    assert list(make_pool(settings, Words(), 1, 3).rows) == [[3, 3, 5]]
    (tmp_path / "q.jsonl").write_text(line % "ansver")
    with pytest.raises(RequestError, match="unknown key 'ansver'"):
        make_pool(settings, Words(), 1, 3)


def test_every_start_has_prompts_of_its_own(tmp_path):
    settings = write_sources(tmp_path)
    whole = list(make_pool(settings, Words(), 6, 3).rows)
    parts = []
    for number in (0, 1, 2):
        with started(number):
            parts += make_pool(settings, Words(), 2, 3).rows
    assert parts == whole
    message = "hold 15 prompts of 3 tokens, 60 are needed"
    with started(2), pytest.raises(RequestError, match=message):
        make_pool(settings, Words(), 20, 3)


def test_pool_has_no_special_tokens_inside_of_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "PIECE", 14)  # characters: two words
    pool = make_pool(write_sources(tmp_path), Wrapped(), 6, 3)
    assert list(pool.rows)[:3] == [[100, 3, 3], [100, 6, 6], [100, 3, 5]]
    assert list(pool.rows)[3:] == [[6, 6, 6], [100, 1, 2], [6, 6, 6]]


def test_pool_too_little_text_is_refused(tmp_path):
    settings = write_sources(tmp_path)
    message = "hold 2 prompts of 4 tokens, 9 are needed; give longer files"
    (tmp_path / "t.txt").write_text("short")
    with pytest.raises(RequestError, match=message):
        make_pool(settings, Words(), 9, 4)


def test_prompt_files_without_data_dir_are_the_packaged_text():
    (path,) = prompt_files(PromptSettings())
    assert path.name == "books.txt" and path.is_file()
    with pytest.raises(FileNotFoundError, match="nothing.txt"):
        prompt_files(PromptSettings(data_dir="/", sources=("nothing.txt",)))


def test_packaged_text_is_enough_for_the_longest_prompts():
    tokenizer = load_tokenizer(open_checkpoint("default"))
    rows = make_pool(PromptSettings(), tokenizer, 6, 512).rows
    assert [len(row) for row in rows] == [512] * 6
    assert len({tuple(row) for row in rows}) == 6
