"""Bodies and chunks: what is streamed is what would not be."""

import dataclasses
import json
import random

import pytest

from moe_edge.serve.answers import (
    DONE,
    Answer,
    ChatAnswer,
    CompletionAnswer,
    data_line,
    to_json,
)
from moe_edge.serve.call import Call
from moe_edge.serve.chat_body import read_chat
from moe_edge.serve.chat_template import find_template
from moe_edge.serve.completion_body import read_completion
from tests.support.served import EOS, body_of, play

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "mill"}]


def completion(model, tokens, stream=False, **fields):
    given = {"prompt": "the mill", "seed": 3, "max_tokens": 60}
    given |= (STREAM if stream else {}) | fields
    request = read_completion(body_of(**given), model)
    return play(request, request.encode(model), model, tokens, stream)


def chat(model, tokens, stream=False, **fields):
    given = {"messages": MESSAGES} | (STREAM if stream else {}) | fields
    request = read_chat(body_of(**given), model)
    prompts = request.encode(model, find_template(None))
    return play(request, prompts, model, tokens, stream)


def parts_of(chunks, index: int):
    return [
        part for chunk in chunks for part in chunk["choices"] if part["index"] == index
    ]


def random_answer(rng, tokenizer):
    text = rng.choice(["sacks 🦊 of flour", "naïve naïve", "3 cats and 1 dog"])
    ids = tokenizer.encode(text)
    ids = [rng.choice([*ids, rng.randrange(1, 320)]) for _ in range(20)]
    whole, start = tokenizer.decode(ids), rng.randrange(5)
    stop = [whole[start : start + 3]] if rng.random() < 0.5 and whole[start:] else []
    return [*ids, EOS], stop


@pytest.mark.parametrize("seed", range(12))
def test_completion_chunks_join_to_the_body(model, tokenizer, seed):
    rng = random.Random(seed)
    tokens, stop = random_answer(rng, tokenizer)
    fields = {"stop": stop, "echo": seed % 2 == 0, "n": 1 + seed % 3}
    if seed % 3:
        fields["logprobs"] = seed % 4
    body = completion(model, tokens, **fields)
    *chunks, last = completion(model, tokens, stream=True, **fields)
    assert last["usage"] == body["usage"] and last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len(body["choices"]) == fields["n"]
    for choice in body["choices"]:
        parts = parts_of(chunks, choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        for key, values in (choice["logprobs"] or {}).items():
            assert sum((part["logprobs"][key] for part in parts), []) == values


@pytest.mark.parametrize("seed", range(6))
def test_chat_chunks_join_to_the_body(model, tokenizer, seed):
    tokens, stop = random_answer(random.Random(seed), tokenizer)
    fields = {"stop": stop, "n": 2}
    if seed % 2:
        fields |= {"logprobs": True, "top_logprobs": 2}
    body = chat(model, tokens, **fields)
    *chunks, last = chat(model, tokens, stream=True, **fields)
    assert last["usage"] == body["usage"]
    for choice in body["choices"]:
        first, *parts, end = parts_of(chunks, choice["index"])
        assert first["delta"] == {"role": "assistant", "content": ""}
        text = "".join(part["delta"]["content"] for part in parts)
        assert text == choice["message"]["content"]
        assert (end["delta"], end["finish_reason"]) == ({}, choice["finish_reason"])
        if choice["logprobs"] is not None:
            content = [part["logprobs"]["content"] for part in parts]
            assert sum(content, []) == choice["logprobs"]["content"]


def test_completion_body_is_openais(model, tokenizer):
    ids = tokenizer.encode("sacks")
    body = completion(model, [*ids, EOS], logprobs=1)
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert body["id"].startswith("cmpl-") and body["created"] > 1_700_000_000
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("sacks", "stop")
    # The end token is named too: lm-eval counts one new token from the end.
    assert choice["logprobs"]["tokens"][-1] == "<|end|>"
    assert choice["logprobs"]["text_offset"][-1] == 5


def test_echo_scores_the_prompt(model, tokenizer):
    ids = tokenizer.encode("the mill")
    body = completion(model, [5], logprobs=2, echo=True, max_tokens=1, prompt=ids)
    (choice,) = body["choices"]
    assert choice["text"] == "the mill" + tokenizer.decode([5])
    logprobs = choice["logprobs"]
    own, top = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert len(own) == len(ids) + 1 and (own[0], top[0]) == (None, None)
    for i, token in enumerate(logprobs["tokens"][1:], start=1):
        assert top[i][token] == own[i]
    assert logprobs["text_offset"][-1] == len("the mill")


def test_echo_without_new_tokens_shows_the_prompt_only(model):
    for stream in (False, True):
        fields = {"echo": True, "max_tokens": 0, "logprobs": 0}
        answer = completion(model, [EOS], stream=stream, **fields)
        parts = parts_of(answer[:-1], 0) if stream else answer["choices"]
        usage = (answer[-1] if stream else answer)["usage"]
        assert "".join(part["text"] for part in parts) == "the mill"
        assert parts[-1]["finish_reason"] == "length"
        assert usage["completion_tokens"] == 0


def test_usage_adds_up_over_choices_and_prompts(model, tokenizer):
    tokens = tokenizer.encode("sacks of flour")[:3]
    body = completion(model, tokens, prompt=[[5, 6], [7, 8, 9]], n=2, max_tokens=3)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)
    assert usage["total_tokens"] == 17
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["moe_edge"] == {
        "k_min": 8,
        "k_mean": 16.0,
        "k_max": 24,
        "substituted_share": 0.25,
        "bytes_moved": 4000.0,
        "queue_ms": 250.0,
        "ttft_ms": 750.0,
        "tpot_ms": 250.0,
        "ended_by": "length",
    }


@pytest.mark.parametrize(
    "fields, tokens, ended_by, reason",
    [
        ({}, [70, EOS], "eos", "stop"),
        ({"max_tokens": 1}, [70], "length", "length"),
        ({}, [70], "deadline", "length"),
    ],
)
def test_ends_are_named(model, fields, tokens, ended_by, reason):
    body = completion(model, tokens, **fields)
    assert body["usage"]["moe_edge"]["ended_by"] == ended_by
    assert body["choices"][0]["finish_reason"] == reason


def test_stop_in_the_last_held_characters_is_a_stop(model, tokenizer):
    sack, fox = tokenizer.encode("sack"), tokenizer.encode("🦊")
    tokens = [*sack, fox[0]]  # nothing follows: the unfinished character is shown
    body = completion(model, tokens, stop=["ck\ufffd"], max_tokens=len(tokens))
    assert body["choices"][0]["text"] == "sa"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["moe_edge"]["ended_by"] == "stop"


def test_choices_are_requests_with_seeds_that_follow(model):
    body = body_of(prompt=[[5], [6]], n=2, seed=7, logprobs=1, deadline_ms=500)
    request = read_completion(body, model)
    call = Call(request, request.encode(model), model, "/v1/completions", 100.0)
    asked = call.rows
    assert [each.prompt for each in asked] == [(5,), (5,), (6,), (6,)]
    assert [each.sampling.seed for each in asked] == [7, 8, 7, 8]
    assert [call.prompt(index).ids for index in range(4)] == [(5,), (5,), (6,), (6,)]
    assert {each.deadline_s for each in asked} == {100.5}
    assert {(each.floor, each.new_tokens) for each in asked} == {(32, 16)}
    assert {(each.top_logprobs, each.score_prompt) for each in asked} == {(1, False)}


@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("wanted", [None, 2])
@pytest.mark.parametrize("kind", [completion, chat])
def test_lines_of_more_text_are_those_of_its_chunks(
    model, monkeypatch, kind, wanted, wants_usage
):
    """Byte by byte, though their constant parts are made once for a row."""
    lines, answers = [], []

    def both(answer, index):
        shown = answer._call.texts[index].take()
        monkeypatch.setattr(answer, "_take", lambda index: shown)
        chunk, line = Answer.more(answer, index), answer.more_line(index)
        assert (chunk is None) == (line is None)
        if line is not None:
            plain = {"separators": (",", ":"), "allow_nan": False}
            assert line == f"data: {json.dumps(chunk, **plain)}\n\n".encode("ascii")
            lines.append(line)
            answers.append(answer)

    monkeypatch.setattr(CompletionAnswer, "more", both)
    monkeypatch.setattr(ChatAnswer, "more", both)
    monkeypatch.setattr(ChatAnswer, "end", Answer.end)  # its own asks for more
    odd = dataclasses.replace(model, id='a "text":"" "content":"" é\u2028')
    text = 'sacks "🦊"\n\\ \u2028 naïve <|end|> of flour'
    fields = {"n": 2, "stream_options": {"include_usage": wants_usage}}
    if wanted is not None:
        more = {"logprobs": True, "top_logprobs": wanted}
        fields |= more if kind is chat else {"logprobs": wanted}
    kind(odd, model.tokenizer.encode(text), stream=True, **fields)
    assert len(lines) > 20 and any(b"\\ud83e" in line for line in lines)
    assert len(set(map(id, answers))) == 1


def test_lines_of_a_stream_are_one_event_each():
    chunk = {"text": "a\n\u2028🦊"}
    line = data_line(chunk)
    assert line.startswith(b"data: ") and line.endswith(b"\n\n")
    assert len(line.splitlines()) == 2 and line.decode("ascii")
    assert json.loads(line[6:]) == chunk
    assert DONE == b"data: [DONE]\n\n"
    with pytest.raises(ValueError):
        to_json({"logprob": float("nan")})
