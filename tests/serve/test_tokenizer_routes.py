"""The routes by which lm-eval and others tokenize."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import processors

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.serve.chat_body import read_chat
from moe_edge.serve.chat_template import find_template
from moe_edge.serve.errors import ApiError
from moe_edge.serve.tokenizer_routes import detokenize, tokenize, tokenizer_info
from tests.support.served import EOS, body_of, model_of
from tests.support.tiny_checkpoint import CONFIG, tiny_tokenizer

PLAIN = find_template(None)


def test_tokenize_a_text(model, tokenizer):
    ids = tokenizer.encode("<|end|> mill 🦊")
    answer = tokenize(
        body_of(prompt="<|end|> mill 🦊", add_special_tokens=False), model, PLAIN
    )
    assert answer == {"count": len(ids), "max_model_len": 128, "tokens": ids}
    assert ids[0] == EOS
    named = tokenize(body_of(prompt="mill", return_token_strs=True), model, PLAIN)
    assert "".join(named["token_strs"]) == "mill"


def test_tokenize_a_conversation(model, tokenizer):
    messages = [{"role": "user", "content": "mill"}]
    for prompted in (True, False):
        body = body_of(messages=messages, add_generation_prompt=prompted)
        text = PLAIN.render(messages, add_generation_prompt=prompted)
        assert tokenize(body, model, PLAIN)["tokens"] == tokenizer.encode(text)


def test_conversation_gets_no_end_token(tmp_path):
    inner = tiny_tokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", EOS)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    vocab = SimpleNamespace(vocab_size=CONFIG["vocab_size"])
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", vocab)
    model = model_of(tokenizer)
    body = body_of(messages=[{"role": "user", "content": "mill"}])
    ids = tokenizer.encode("User: mill\n\nAssistant:")
    assert ids[0] == ids[-1] == EOS
    assert tokenize(body, model, PLAIN)["tokens"] == ids[:-1]
    (encoded,) = read_chat(body, model).encode(model, PLAIN)
    assert encoded.ids == tuple(ids[:-1])
    answer = tokenize(body_of(prompt="User: mill\n\nAssistant:"), model, PLAIN)
    assert answer["tokens"] == ids


def test_detokenize_is_the_way_back(model, tokenizer):
    ids = [*tokenizer.encode("mill 🦊"), EOS]
    body = body_of(tokens=ids, model="tiny")
    assert detokenize(body, model) == {"prompt": "mill 🦊<|end|>"}
    assert detokenize(body_of(tokens=[]), model) == {"prompt": ""}


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({}, "invalid_value", "prompt"),
        ({"prompt": "a", "messages": []}, "invalid_value", "messages"),
        ({"prompt": ["a"]}, "invalid_value", "prompt"),
        (
            {"prompt": "a", "add_generation_prompt": True},
            "invalid_value",
            "add_generation_prompt",
        ),
        (
            {"prompt": "a", "chat_template_kwargs": {}},
            "invalid_value",
            "chat_template_kwargs",
        ),
        ({"prompt": "a", "x": 1}, "unknown_parameter", "x"),
        ({"prompt": "a", "model": "x"}, "model_not_found", "model"),
        (
            {"prompt": "a", "chat_template": "x"},
            "unsupported_parameter",
            "chat_template",
        ),
    ],
)
def test_tokenize_rejects_field(model, fields, code, param):
    with pytest.raises(ApiError) as caught:
        tokenize(body_of(**fields), model, PLAIN)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "there are no tokens"),
        ({"tokens": [320]}, r"tokens is 320, expected token ids in 0\.\.319"),
        ({"tokens": "a"}, "tokens is 'a', expected a list of token ids"),
    ],
)
def test_detokenize_rejects_field(model, fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        detokenize(body_of(**fields), model)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "tokens")


def test_tokenizer_info_always_names_the_end(tokenizer, model):
    info = tokenizer_info(model, PLAIN)
    assert (info["eos_token"], info["model_max_length"]) == ("<|end|>", 128)
    assert info["chat_template"] == PLAIN.source and info["tokenizer_class"]
    assert tokenizer_info(model_of(tokenizer, eos_ids=()), PLAIN)["eos_token"] is None


def test_tokenizer_info_is_the_config_with_plain_tokens(tmp_path, tokenizer, model):
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "x": 1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    there = tokenizer.folder
    try:
        tokenizer.folder = tmp_path
        info = tokenizer_info(model, find_template(tmp_path))
    finally:
        tokenizer.folder = there
    assert (info["eos_token"], info["bos_token"], info["x"]) == ("</s>", "<s>", 1)
