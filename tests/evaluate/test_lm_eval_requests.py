"""Likelihoods and generations as lm-eval asks for them, without lm-eval."""

import sys

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError, RequestError
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.likelihood import Forced, score_rows
from moe_edge.evaluate.lm_eval_requests import (
    Ending,
    fit_target,
    generate_texts,
    parse_ending,
)
from moe_edge.evaluate.run_lm_eval import run_lm_eval
from tests.support.table_engine import TableEngine
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    loaded = load_engine(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "m"))
    return loaded.engine, loaded.tokenizer


def test_fit_target_cuts_the_left_end():
    assert fit_target([1, 2, 3], [4, 5], 10) == Forced([1, 2, 3, 4, 5], 3)
    # The last token is not read: a context of three holds three before it.
    assert fit_target([1, 2, 3], [4, 5], 3) == Forced([2, 3, 4, 5], 2)
    assert fit_target([1], [2, 3], 2) == Forced([1, 2, 3], 1)


def test_fit_target_refuses_what_cannot_be_scored():
    with pytest.raises(CapacityError, match="3 tokens exceeds .* context of 2"):
        fit_target([1], [2, 3, 4], 2)
    with pytest.raises(RequestError, match="0 context and 1 continuation tokens"):
        fit_target([], [2], 2)


def test_score_rows_sums_targets_and_says_greedy():
    engine = TableEngine()
    best = engine.table_VV.argmax(axis=1)
    rng = np.random.default_rng(1)
    rows = [
        Forced(rng.integers(0, 11, n).tolist(), n - count)
        for n, count in ((9, 3), (2, 1), (14, 13), (6, 2))
    ]
    start = 3
    chain = [start, int(best[start]), int(best[best[start]])]
    rows.append(Forced([7, *chain], 2))
    found = score_rows(engine, rows, batch_size=2)
    for row, (log_prob, is_greedy) in zip(rows, found, strict=True):
        pairs = list(zip(row.ids, row.ids[1:], strict=False))[row.first - 1 :]
        want = sum(engine.log_prob(last, token) for last, token in pairs)
        np.testing.assert_allclose(log_prob, want, rtol=1e-5)
        assert is_greedy == all(best[last] == token for last, token in pairs)
    assert found[-1][1]
    # Never more rows than asked for, and rows of a batch of like lengths.
    assert engine.shapes == [(2, 13), (2, 5), (2, 1)]


def test_parse_ending_reads_the_harness_options():
    ending = parse_ending({"until": ["\n", ""], "max_gen_toks": 7}, 64)
    assert ending == Ending(("\n",), 7)
    assert parse_ending({"until": "\n", "temperature": 0.0}, 64).max_new_tokens == 32
    assert parse_ending({}, 4096) == Ending((), 256)
    # Greedy in the harness, whatever the temperature.
    greedy = {"do_sample": False, "temperature": 0.7, "top_p": 0.9}
    assert parse_ending(greedy, 64) == Ending((), 32)
    twice = {"max_new_tokens": 7, "max_completion_tokens": 7}
    assert parse_ending(twice, 64) == Ending((), 7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"do_sample": True}, RequestError, "only greedy"),
        ({"temperature": 0.7}, RequestError, "only greedy"),
        (
            {"max_tokens": 9, "max_gen_toks": 7},
            RequestError,
            "{'max_gen_toks': 7, 'max_tokens': 9} name more than one length",
        ),
        ({"num_beams": 4}, RequestError, "option 'num_beams'; known: until, max_gen"),
        ({"until": [3]}, RequestError, r"until is \[3\], expected texts"),
        ({"max_gen_toks": 0}, ConfigError, "max_gen_toks must be .*got 0"),
        ({"max_gen_toks": 64}, CapacityError, "max_gen_toks 64 .* context of 64"),
    ],
)
def test_parse_ending_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        parse_ending(options, 64)


def test_generate_texts_equals_generate(tiny):
    engine, tokenizer = tiny
    texts = ["The river runs", "How many", "There are 12 sacks, 3 cats and"]
    prompts = [tokenizer.encode(text) for text in texts]
    got = generate_texts(engine, tokenizer, prompts, Ending((), 8), batch_size=2)
    for prompt, text in zip(prompts, got, strict=True):
        run = generate(engine, [prompt], 8, stop_ids=engine.config.eos_ids)
        ids = [t for t in run.tokens[0] if t not in engine.config.eos_ids]
        whole = tokenizer.decode(prompt + ids)
        assert text and text == whole[len(tokenizer.decode(prompt)) :]


def test_generate_texts_ends_before_the_first_stop_text(tiny):
    engine, tokenizer = tiny
    prompts = [tokenizer.encode("The river runs")]
    (whole,) = generate_texts(engine, tokenizer, prompts, Ending((), 12), 2)
    late, early = whole[6:8], whole[3:5]
    (text,) = generate_texts(engine, tokenizer, prompts, Ending((late, early), 12), 2)
    assert text == whole[: min(whole.find(late), whole.find(early))]


def test_generate_texts_stops_decoding_at_the_stop_text(tiny):
    engine, tokenizer = tiny
    steps = []

    class Counted:
        config = engine.config

        def __getattr__(self, name):
            return getattr(engine, name)

        def decode(self, *args):
            steps.append(1)
            return engine.decode(*args)

    prompts = [tokenizer.encode("The river runs")]
    (whole,) = generate_texts(engine, tokenizer, prompts, Ending((), 20), 3)
    generate_texts(Counted(), tokenizer, prompts, Ending((whole[0],), 20), 3)
    assert len(steps) <= 2  # a character may take several tokens


def test_generate_texts_long_prompt_loses_its_left_end(tiny):
    engine, tokenizer = tiny
    prompt = tokenizer.encode("The river runs past the old mill. " * 20)
    assert len(prompt) > 128
    ending = Ending((), 8)
    cut = prompt[-(128 - 8) :]
    assert generate_texts(engine, tokenizer, [prompt], ending, 1) == generate_texts(
        engine, tokenizer, [cut], ending, 1
    )


def test_run_lm_eval_without_the_extra_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"lm-eval is not installed .*\[eval\]"):
        run_lm_eval(out_dir=str(tmp_path / "out"), tasks="any")
    with pytest.raises(ConfigError, match="batch_size must be .* got 0"):
        run_lm_eval(out_dir=str(tmp_path / "out"), tasks="any", batch_size=0)
    with pytest.raises(ConfigError, match="num_fewshot must be 0 or more, got -1"):
        run_lm_eval(out_dir=str(tmp_path / "out"), tasks="any", num_fewshot=-1)
