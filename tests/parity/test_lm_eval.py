"""The lm-evaluation-harness on our engines (extra `eval`); imports are in the tests.

Without the extra these tests fail; the marker alone keeps them out of a plain run.
"""

import types

import numpy as np
import pytest
from tokenizers import processors

from moe_edge.convert.text_stream import decode_after
from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.likelihood import Forced, score_rows
from moe_edge.evaluate.multiple_choice import answer_questions
from moe_edge.evaluate.perplexity import measure_perplexity
from tests.support.lm_eval_tasks import QUESTIONS, as_requests, engine_lm
from tests.support.tiny_checkpoint import TEXT, tiny_tokenizer

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("mode", [None, "layered", "fused"])
def test_loglikelihood_equals_multiple_choice(checkpoint, loaded, mode):
    if mode is not None:
        offload = OffloadOptions(device_memory="60%", mode=mode)
        loaded = load_engine(checkpoint, offload=offload)
    arguments = [(q.prompt, f" {choice}") for q in QUESTIONS for choice in q.choices]
    found = engine_lm(loaded, batch_size=3).loglikelihood(as_requests(*arguments))
    _, lines = answer_questions(loaded.engine, loaded.tokenizer, QUESTIONS)
    want = [
        score * len(choice.encode())
        for line, question in zip(lines, QUESTIONS, strict=True)
        for score, choice in zip(line["nats_per_byte"], question.choices, strict=True)
    ]
    np.testing.assert_allclose([score for score, _ in found], want, rtol=1e-5)
    assert not any(is_greedy for _, is_greedy in found)  # a random model
    loaded.engine.close()


def test_loglikelihood_of_what_the_model_generates_is_greedy(loaded):
    prompt = loaded.tokenizer.encode("The river")
    ids = generate(loaded.engine, [prompt], 3).tokens[0]
    row = (None, prompt, ids)
    ((_, is_greedy),) = engine_lm(loaded)._loglikelihood_tokens([row])
    assert is_greedy
    ids[1] = (ids[1] + 1) % 300
    ((_, is_greedy),) = engine_lm(loaded)._loglikelihood_tokens([row])
    assert not is_greedy


@pytest.mark.parametrize("tokens", [40, 4 * 64])
def test_loglikelihood_rolling_equals_perplexity(loaded, tokens):
    ids = loaded.tokenizer.encode(TEXT * 20)[:tokens]
    text = loaded.tokenizer.decode(ids)
    assert loaded.tokenizer.encode(text) == ids
    model = engine_lm(loaded, batch_size=2)
    model.max_length = 64
    found = model.loglikelihood_rolling(as_requests((text,), ("The",)))
    # The harness puts a token before the text and scores every token once, in windows
    # of 64 inputs: ours of 65 tokens, targets included, that advance by 64.
    ours = measure_perplexity(loaded.engine, [0, *ids], window=65, stride=64)
    assert ours.tokens == tokens
    np.testing.assert_allclose(found[0], -ours.nll, rtol=1e-5)
    assert found[1] < 0


def test_loglikelihood_long_context_loses_its_left_end(loaded):
    long = "The river runs past the old mill. " * 20
    model = engine_lm(loaded)
    ids = model.tok_encode(long + " dog")
    assert len(ids) > 129
    wanted = ids[len(model.tok_encode(long.rstrip())) :]
    ((got, _),) = model.loglikelihood(as_requests((long.rstrip(), "  dog")))
    row = (None, ids[-129 : -len(wanted)], wanted)
    assert got == model._loglikelihood_tokens([row])[0][0]


def test_generate_until_equals_generate(loaded):
    texts = ["The river runs", "How many sacks"]
    options = [{"max_gen_toks": 6, "until": []}, {"max_gen_toks": 4, "until": "\x07"}]
    found = engine_lm(loaded).generate_until(
        as_requests(*zip(texts, options, strict=True))
    )
    for text, option, got in zip(texts, options, found, strict=True):
        prompt = loaded.tokenizer.encode(text)
        run = generate(loaded.engine, [prompt], option["max_gen_toks"])
        assert got == decode_after(loaded.tokenizer, prompt, run.tokens[0])


@pytest.mark.parametrize("single", ["$A <|end|>", "<|end|> $A <|end|>"])
def test_end_token_of_the_tokenizer_is_no_part_of_a_text(loaded, tmp_path, single):
    inner = tiny_tokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|end|>", 0)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    vocab = types.SimpleNamespace(vocab_size=loaded.engine.config.vocab_size)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", vocab)
    model = engine_lm(types.SimpleNamespace(engine=loaded.engine, tokenizer=tokenizer))
    ids, more = loaded.tokenizer.encode("ab cd"), loaded.tokenizer.encode("ab cd mill")
    begin = [0] if single.startswith("<") else []
    rows = [Forced([0, *ids], 1), Forced([*begin, *more], len(begin) + len(ids))]
    want = [score for score, _ in score_rows(loaded.engine, rows, 8)]
    asked = as_requests(("", "ab cd"), ("ab cd", " mill"))
    found = [score for score, _ in model.loglikelihood(asked)]
    np.testing.assert_allclose(found, want, rtol=1e-6)
    (rolling,) = model.loglikelihood_rolling(as_requests(("ab cd",)))
    assert rolling == pytest.approx(want[0], rel=1e-6)
    ending = {"max_gen_toks": 6, "until": []}
    (text,) = model.generate_until(as_requests(("ab cd", ending)))
    run = generate(loaded.engine, [begin + ids], 6, stop_ids=(0,))
    kept = [token for token in run.tokens[0] if token != 0]
    assert text == decode_after(loaded.tokenizer, begin + ids, kept)
