"""Bodies of completions and chat: what is read, and what is refused by name."""

import subprocess
import sys

import pytest

from moe_edge.serve.chat_body import read_chat
from moe_edge.serve.chat_template import ChatTemplate, find_template
from moe_edge.serve.completion_body import read_completion
from moe_edge.serve.errors import ApiError
from tests.support.served import EOS, body_of, model_of

USER = [{"role": "user", "content": "mill"}]


def completion(served, /, **fields):
    return read_completion(body_of(**({"prompt": "mill"} | fields)), served)


def chat(served, /, **fields):
    return read_chat(body_of(**({"messages": USER} | fields)), served)


def test_completion_defaults_are_openais(model):
    request = completion(model)
    assert request.prompts == ("mill",)
    assert (request.n, request.max_new_tokens, request.temperature) == (1, 16, 1.0)
    assert (request.top_p, request.stop, request.echo) == (1.0, (), False)
    assert request.top_logprobs is None and request.deadline_s is None
    assert not (request.stream or request.include_usage or request.ignore_eos)
    assert request.floor == model.default_floor
    assert completion(model).seed != request.seed  # drawn anew


def test_completion_reads_every_field(model):
    request = completion(
        model,
        model="tiny",
        n=2,
        seed=-(2**63),
        temperature=2,
        top_p=0.5,
        max_tokens=0,
        echo=True,
        logprobs=20,
        stop=["a", "b", "a"],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        min_k=4,
        quality=0.9,
        deadline_ms=250,
        ignore_eos=True,
        user="u",
        metadata={"a": [1]},
        store=True,
        service_tier="auto",
        best_of=1,
        logit_bias={},
        suffix=None,
        presence_penalty=0.0,
    )
    assert (request.n, request.floor, request.deadline_s) == (2, 32, 0.25)
    assert (request.max_new_tokens, request.top_logprobs) == (0, 20)
    assert request.stop == ("a", "b") and request.include_usage
    assert request.score_prompt and request.ignore_eos
    first, second = request.sampling(0), request.sampling(1)
    assert (first.temperature, first.top_p, first.seed) == (2.0, 0.5, -(2**63))
    assert second.seed == first.seed + 1


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("a", ("a",)),
        ([5, 6], ((5, 6),)),
        (["a", ""], ("a", "")),
        ([[5], [6, 7]], ((5,), (6, 7))),
        ([[5], "a"], ((5,), "a")),
    ],
)
def test_completion_prompt_of_every_kind(model, prompt, prompts):
    assert completion(model, prompt=prompt).prompts == prompts


@pytest.mark.parametrize("temperature, used", [(0, 0.0), (9e-5, 0.0), (1e-4, 1e-4)])
def test_temperature_that_float32_cannot_divide_by_is_greedy(model, temperature, used):
    assert completion(model, temperature=temperature).temperature == used


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"prompt": None}, "prompt", "there is no prompt"),
        ({"prompt": []}, "prompt", r"prompt is \[\], expected text, token ids, or"),
        ({"prompt": {}}, "prompt", r"prompt is {}, expected text, token ids"),
        ({"prompt": [1, "a"]}, "prompt", "prompt is 'a', expected token ids in"),
        ({"prompt": ["a", 1]}, "prompt[1]", "is 1, expected a list of token ids"),
        ({"prompt": [[320]]}, "prompt[0]", r"is 320, expected token ids in 0\.\.319"),
        ({"prompt": ["a"] * 2049}, "prompt", "prompt is 2049, expected at most 2048"),
        ({"prompt": ["a"] * 17, "n": 128}, "n", "2176 choices of one request, expect"),
        (
            {"n": 103, "logprobs": 20},
            "n",
            "103 choices with 20 likely tokens beside",
        ),
        ({"n": 0}, "n", "n is 0"),
        ({"n": 129}, "n", "n is 129"),
        ({"seed": 2**63}, "seed", "seed is 9223372036854775808"),
        ({"temperature": 2.01}, "temperature", "temperature is 2.01"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"top_p": 0}, "top_p", "top_p is 0"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, expected 1 or more, or"),
        ({"logprobs": True}, "logprobs", "logprobs is True"),
        ({"logprobs": 21}, "logprobs", r"logprobs is 21, .* in 0\.\.20"),
        ({"echo": 1}, "echo", "echo is 1"),
        ({"stop": ["a"] * 17}, "stop", "expected a string or a list of up to 16"),
        ({"stop": ["a", ""]}, "stop[1]", "is '', expected some text"),
        ({"stop": [1]}, "stop[0]", "is 1, expected a string"),
        ({"stop": 1}, "stop", "stop is 1"),
        ({"stop": "x" * 401}, "stop[0]", "expected at most 400 characters, not 401"),
        ({"stream": "yes"}, "stream", "stream is 'yes'"),
        ({"stream_options": {}}, "stream_options", "without stream: true"),
        ({"stream": True, "stream_options": 1}, "stream_options", "expected an object"),
        ({"min_k": 0}, "min_k", r"min_k is 0, expected a whole number in 1\.\.32"),
        ({"min_k": 33}, "min_k", r"min_k is 33, expected a whole number in 1\.\.32"),
        ({"quality": 1.01}, "quality", "quality is 1.01"),
        ({"deadline_ms": 0}, "deadline_ms", "deadline_ms is 0"),
        ({"ignore_eos": "x"}, "ignore_eos", "ignore_eos is 'x'"),
    ],
)
def test_completion_rejects_value(model, fields, param, message):
    with pytest.raises(ApiError, match=message) as caught:
        completion(model, **fields)
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"top_k": 5}, "unknown_parameter", "top_k"),
        ({"messages": USER}, "unknown_parameter", "messages"),
        (
            {"stream": True, "stream_options": {"x": 1}},
            "unknown_parameter",
            "stream_options.x",
        ),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"frequency_penalty": 0.1}, "unsupported_parameter", "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"model": 5}, "model_not_found", "model"),
    ],
)
def test_completion_rejects_field(model, fields, code, param):
    with pytest.raises(ApiError) as caught:
        completion(model, **fields)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_completion_encodes_text_and_keeps_ids(model, tokenizer):
    request = completion(model, prompt=["mill", [5, EOS]], max_tokens=8, echo=True)
    text, ids = request.encode(model)
    assert (list(text.ids), text.text) == (tokenizer.encode("mill"), "mill")
    assert ids.ids == (5, EOS) and ids.text.endswith("<|end|>")
    assert request.new_tokens(ids, model) == 8


def test_completion_rejects_prompt_that_does_not_fit(model):
    fits = completion(model, prompt=[5] * 120, max_tokens=8)
    fits.encode(model)
    silent = {"max_tokens": 0, "echo": True}
    for length in (1, 128):
        completion(model, prompt=[5] * length, **silent).encode(model)
    for fields, count in (({"max_tokens": 9}, 9), (silent, 0)):
        request = completion(model, prompt=[[5], [5] * (129 - count)], **fields)
        message = f"{129 - count} tokens, which with {count} new ones exceed .* of 128"
        with pytest.raises(ApiError, match=message) as caught:
            request.encode(model)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"


def test_completion_rejects_prompt_without_tokens(model):
    with pytest.raises(ApiError, match="the prompt is empty") as caught:
        completion(model, prompt=["a", ""]).encode(model)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "prompt")


def test_chat_defaults_fill_the_context(model, tokenizer):
    request = chat(model)
    assert (request.max_new_tokens, request.top_logprobs) == (None, None)
    template = find_template(None)
    (prompt,) = request.encode(model, template)
    assert prompt.text == "User: mill\n\nAssistant:"
    assert list(prompt.ids) == tokenizer.encode(prompt.text)
    assert request.new_tokens(prompt, model) == 128 - len(prompt.ids)


def test_chat_reads_its_own_fields(model):
    request = chat(
        model,
        max_completion_tokens=5,
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        structured_outputs=None,
        reasoning_effort=None,
        parallel_tool_calls=True,
    )
    assert (request.max_new_tokens, request.top_logprobs) == (5, 2)
    assert not request.score_prompt
    assert chat(model, logprobs=True).top_logprobs == 0
    assert chat(model, logprobs=False).top_logprobs is None
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    lm_eval = {"role": "assistant", "content": parts, "name": "x", "type": "text"}
    assert chat(model, messages=[lm_eval]).messages == (
        {"role": "assistant", "content": "a\nb", "name": "x"},
    )


def test_variables_reach_the_template(model):
    template = ChatTemplate("{{ 'no' if enable_thinking is false else 'yes' }}", "x")
    for given, expected in (
        ({}, "yes"),
        ({"enable_thinking": False}, "no"),
        ({"enable_thinking": True, "other": [1]}, "yes"),
    ):
        request = chat(model, chat_template_kwargs=given)
        assert request.encode(model, template)[0].text == expected


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"messages": None}, "invalid_value", "messages"),
        ({"chat_template_kwargs": [1]}, "invalid_value", "chat_template_kwargs"),
        (
            {"chat_template_kwargs": {"tools": []}},
            "invalid_value",
            "chat_template_kwargs.tools",
        ),
        (
            {"chat_template_kwargs": {"a b": 1}},
            "invalid_value",
            "chat_template_kwargs.a b",
        ),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hi"}, "invalid_value", "messages"),
        ({"messages": ["hi"]}, "invalid_value", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "invalid_value", "messages[0].role"),
        (
            {"messages": [*USER, {"role": "robot", "content": "a"}]},
            "invalid_value",
            "messages[1].role",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "invalid_value",
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "invalid_value",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            "invalid_value",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "invalid_value",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [USER[0] | {"tool_calls": [{}]}]},
            "invalid_value",
            "messages[0].tool_calls[0]",
        ),
        ({"messages": [USER[0] | {"x": 1}]}, "unknown_parameter", "messages[0].x"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "invalid_value", "max_tokens"),
        ({"top_logprobs": 1}, "invalid_value", "top_logprobs"),
        ({"logprobs": 1}, "invalid_value", "logprobs"),
        ({"echo": True}, "unknown_parameter", "echo"),
        ({"prompt": "a"}, "unknown_parameter", "prompt"),
        ({"tools": [{"type": "function"}]}, "invalid_value", "tools[0]"),
    ],
)
def test_chat_rejects_field(model, fields, code, param):
    with pytest.raises(ApiError) as caught:
        chat(model, **fields)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_chat_rejects_conversation_that_does_not_fit(tokenizer):
    small = model_of(tokenizer, max_context=8)
    with pytest.raises(ApiError, match="context of 8") as caught:
        chat(small).encode(small, find_template(None))
    assert caught.value.param == "messages"
    with pytest.raises(ApiError, match="9 messages exceed the context of 8") as caught:
        chat(small, messages=USER * 9)
    assert caught.value.code == "context_length_exceeded"


def test_bodies_calls_and_answers_load_no_jax():
    """Whoever only checks a request starts quickly."""
    code = "import sys, moe_edge.serve.answers, moe_edge.serve.chat_body; "
    code += "assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
