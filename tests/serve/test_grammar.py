"""Answers that follow a grammar: fields, what is refused, what hostile schemas cost."""

import json
import os
import re
import time

import numpy as np
import pytest

from moe_edge.serve import grammar, grammar_trial
from moe_edge.serve.call import Call
from moe_edge.serve.chat_body import read_chat
from moe_edge.serve.completion_body import read_completion
from moe_edge.serve.errors import ApiError
from moe_edge.serve.grammar import (
    MOST_CHARACTERS,
    MOST_TEXT,
    Grammars,
    GrammarSpec,
    text_of,
)
from moe_edge.serve.grammar_trial import Trial, try_grammar
from tests.support.served import EOS, body_of, model_of
from tests.support.tiny_checkpoint import CONFIG

V = CONFIG["vocab_size"]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"enum": ["a", "b"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, V, (EOS,))


def allowed(guide) -> list[int]:
    bits_W = np.zeros(-(-V // 32), np.uint32)
    guide.fill(bits_W)
    bits = np.unpackbits(bits_W.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:V]).tolist()


def drawn(grammars, tokenizer, spec, seed=0, most=300) -> str:
    """What a model says that likes every token alike."""
    guide, rng, ids = grammars.compile(spec).guide(), np.random.default_rng(seed), []
    for _ in range(most):
        ids.append(int(rng.choice(allowed(guide))))
        guide.accept(ids[-1])
        if ids[-1] == EOS:
            return tokenizer.decode(ids)
    raise AssertionError(f"no end after {tokenizer.decode(ids)!r}")


def test_random_tokens_make_json_of_the_schema(grammars, tokenizer):
    spec = GrammarSpec("json", POINT, "f")
    found = [json.loads(drawn(grammars, tokenizer, spec, seed)) for seed in range(20)]
    assert all(set(each) == {"x", "name"} for each in found)
    assert {each["name"] for each in found} == {"a", "b"}
    assert all(type(each["x"]) is int for each in found)


def test_random_tokens_make_a_pattern_and_a_choice(grammars, tokenizer):
    spec = GrammarSpec("regex", "[ab]{2,5}-[0-9]", "f")
    assert re.fullmatch("[ab]{2,5}-[0-9]", drawn(grammars, tokenizer, spec))
    texts = ['yes "sir"', "nö\n", "🦊"]
    spec = GrammarSpec("choice", texts, "f")
    found = {drawn(grammars, tokenizer, spec, seed) for seed in range(30)}
    assert found == set(texts)


def test_rows_of_one_grammar_do_not_disturb_each_other(grammars):
    compiled = grammars.compile(GrammarSpec("choice", ["ab", "cd"], "f"))
    one, other = compiled.guide(), compiled.guide()
    first = allowed(one)
    one.accept(first[0])
    assert allowed(other) == first and allowed(one) != first


def test_prompts_of_a_request_share_its_grammar(tokenizer, grammars, monkeypatch):
    model, made = model_of(tokenizer, grammars=grammars), []
    compile = grammars.compile
    monkeypatch.setattr(
        grammars, "compile", lambda spec: made.append(spec) or compile(spec)
    )
    body = body_of(prompt=["a", "b"], n=2, structured_outputs={"regex": "a"})
    request = read_completion(body, model)
    call = Call(request, request.encode(model), model, "/v1/completions", 0.0)
    assert len(made) == 1 and len({row.guide for row in call.rows}) == 4


HOSTILE = {
    "a pattern of a megabyte": GrammarSpec("regex", "a|" * 500_000 + "b", "f"),
    "as large as allowed": GrammarSpec("regex", "(a|b.)" * (MOST_CHARACTERS // 6), "f"),
    "repeats of repeats": GrammarSpec("regex", "((a{1,999}){1,999}b){1,999}", "f"),
    "nested deeply": GrammarSpec(
        "json", json.loads('{"items":' * 60 + "{}" + "}" * 60), "f"
    ),
    "refers to itself": GrammarSpec("json", {"$ref": "#"}, "f"),
    "refers to itself in parts": GrammarSpec(
        "json",
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"c": {"$ref": "#"}}}}},
        "f",
    ),
    "refers to the web": GrammarSpec("json", {"$ref": "http://127.0.0.1:1/x"}, "f"),
    "many ways": GrammarSpec(
        "json",
        {"allOf": [{"anyOf": [{"type": ["object", "null"]}] * 40}] * 20},
        "f",
    ),
    "wide": GrammarSpec(
        "json",
        {"properties": {f"k{i}": {"pattern": "^(a|b){1,99}$"} for i in range(900)}},
        "f",
    ),
    "long": GrammarSpec("json", {"type": "array", "minItems": 10**9}, "f"),
    # Without a trial of its own, each of these ended the server or took hours.
    "long chain of references": GrammarSpec(
        "json",
        {
            "$ref": "#/$defs/0",
            "$defs": {
                i: {"properties": {"c": {"$ref": f"#/$defs/{i + 1}"}}}
                for i in range(1000)
            }
            | {1000: {"type": "integer"}},
        },
        "f",
    ),
    "large multiple": GrammarSpec("json", {"multipleOf": 99_400_891}, "f"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_cost_little(grammars, name):
    start_s = time.process_time() + sum(os.times()[2:4])  # of children, too
    try:
        guide = grammars.compile(HOSTILE[name]).guide()
        for _ in range(3):
            tokens = allowed(guide)
            if not tokens or guide.failure:
                break
            guide.accept(tokens[0])
    except ApiError as error:
        assert (error.code, error.param) == ("invalid_value", "f")
        assert len(error.message) < 500
    assert time.process_time() + sum(os.times()[2:4]) - start_s < 6


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"response_format": "json"}, "response_format", "whose type is one of text,"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "has no json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
            "expected a JSON schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {}}},
            "response_format.json_schema",
            "unknown parameter",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice",
            "a list of 1 to 1024 texts",
        ),
        (
            {"structured_outputs": {"choice": ["a", ""]}},
            "structured_outputs.choice[1]",
            "expected some text",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs",
            "exactly one of json, json_object, regex, choice",
        ),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
            "give one",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos",
            "ends with an end-of-text token",
        ),
    ],
)
def test_fields_are_refused_by_name(tokenizer, grammars, fields, param, message):
    model = model_of(tokenizer, grammars=grammars)
    body = body_of(messages=[{"role": "user", "content": "a"}], **fields)
    with pytest.raises(ApiError, match=message) as caught:
        read_chat(body, model)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"not": {"type": "string"}}, r'Unimplemented keys: \["not"\]'),
        ({"type": "array", "uniqueItems": True}, ".*uniqueItems"),
    ],
)
def test_parts_of_schemas_that_are_unknown_are_named(grammars, schema, message):
    with pytest.raises(ApiError, match=f"f cannot be enforced: {message}"):
        grammars.compile(GrammarSpec("json", schema, "f"))


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "a(b", "f"),
        GrammarSpec("json", {"type": "string", "pattern": "a(b"}, "f"),
    ],
)
def test_why_a_pattern_is_none_is_said_in_one_line(grammars, spec):
    with pytest.raises(ApiError, match="regex parse error: unclosed group$") as caught:
        grammars.compile(spec)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "spec, what, most",
    [
        (GrammarSpec("choice", ["ab" * MOST_TEXT], "f"), "a text in f", MOST_TEXT),
        (GrammarSpec("choice", ["ab" * 900] * 40, "f"), "f", MOST_CHARACTERS),
        (GrammarSpec("regex", "a" * (MOST_TEXT + 1), "f"), "f", MOST_TEXT),
        (GrammarSpec("json", {"enum": ["é" * 2000]}, "f"), "a text in f", MOST_TEXT),
    ],
)
def test_long_texts_which_would_slow_each_step_are_refused(grammars, spec, what, most):
    with pytest.raises(ApiError, match=f"^{what} has .* at most {most}$") as caught:
        grammars.compile(spec)
    assert caught.value.param == "f"


def test_words_that_only_describe_a_schema_may_be_long(grammars):
    long = {"description": "a" * MOST_CHARACTERS}
    grammars.compile(GrammarSpec("json", {"properties": {"description": long}}, "f"))


def test_open_grammars_are_shared_and_bounded(grammars, monkeypatch):
    size = 3 * grammar.MOST_BYTES // 4
    monkeypatch.setattr(grammar, "MOST_OPEN_BYTES", 2 * size)
    monkeypatch.setattr(grammar, "try_grammar", lambda text: Trial(None, size))
    first, second = (
        grammars.compile(GrammarSpec("regex", text, "f")).guide() for text in "ab"
    )
    again = grammars.compile(GrammarSpec("regex", "a", "f")).guide()  # costs nothing
    with pytest.raises(ApiError, match="2 grammars .* no memory for f; try") as caught:
        grammars.compile(GrammarSpec("regex", "c", "f"))
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    del second
    grammars.compile(GrammarSpec("regex", "c", "f"))
    assert allowed(first) == allowed(again)
    monkeypatch.setattr(grammar, "try_grammar", lambda text: Trial(None, 2 * size))
    with pytest.raises(ApiError, match="f cannot be .* it takes 384 MiB, expected 256"):
        grammars.compile(GrammarSpec("regex", "d", "f"))


def test_trial_knows_what_a_grammar_takes():
    wide = GrammarSpec("json", HOSTILE["wide"].value, "f")
    assert try_grammar(text_of(wide)).num_bytes > 1 << 22
    small = GrammarSpec("choice", ["a"], "f")
    assert try_grammar(text_of(small)).num_bytes < grammar.LEAST_BYTES


def test_model_without_an_end_is_refused(tokenizer):
    with pytest.raises(ApiError, match="no end-of-text token"):
        Grammars(tokenizer, V, ()).compile(GrammarSpec("regex", "a", "f"))


def test_tokenizer_is_read_once_also_if_it_cannot_be(tokenizer, monkeypatch):
    grammars, tried = Grammars(tokenizer, V, (EOS,)), []

    def fails(*given, **more):
        tried.append(given)
        raise ValueError("no such model")

    monkeypatch.setattr("llguidance.LLTokenizer", fails)
    grammars.prepare()
    for _ in range(2):
        with pytest.raises(ApiError, match="cannot read .* tokenizer: no such model"):
            grammars.compile(GrammarSpec("regex", "a", "f"))
    assert len(tried) == 1


def test_a_trial_that_says_nothing_is_a_fault(tmp_path, monkeypatch):
    """As where its thread has failed: the process ends well all the same."""
    (silent := tmp_path / "silent.py").write_text("")
    monkeypatch.setattr(grammar_trial, "__file__", str(silent))
    assert "too deeply" in try_grammar("start: /tried only here/").fault
