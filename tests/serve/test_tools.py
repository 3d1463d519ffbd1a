"""Calls of tools: how families write them, and what a request may say of them."""

import json

import numpy as np
import pytest

from moe_edge.serve.chat_body import read_chat
from moe_edge.serve.chat_template import ChatTemplate, find_template
from moe_edge.serve.errors import ApiError
from moe_edge.serve.grammar import Grammars, GrammarSpec
from moe_edge.serve.tools.base import Rules, Tool, ToolCall
from moe_edge.serve.tools.dialects import DIALECTS, find_dialect
from moe_edge.serve.tools.harmony import HarmonySplit
from moe_edge.serve.tools.split import ToolSplit
from tests.support.served import EOS, body_of, model_of, play
from tests.support.tiny_checkpoint import CONFIG

V = CONFIG["vocab_size"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Bonn"]},
        "days": {"type": "integer"},
    },
    "required": ["city", "days"],
}
WEATHER = Tool("get_weather", SCHEMA, {})
STOP = Tool("stop", {"type": "object", "properties": {}}, {})
NOTE = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = {tool.name: tool for tool in (WEATHER, STOP, Tool("note", NOTE, {}))}
ROME = ToolCall("get_weather", '{"city": "Rome", "days": 3}')
NOTED = ToolCall("note", '{"text": "a <b>\\nc"}')
# As models of each family write the calls ROME and NOTED.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", '
    '"days": 3}}\n</tool_call>\n<tool_call>{"name": "note", "arguments": '
    '{"text": "a <b>\\nc"}}</tool_call>',
    "qwen_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n"
    "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=note>\n<parameter=text>\na <b>\nc\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome"
    "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    "<tool_call>note<arg_key>text</arg_key>\n<arg_value>a <b>\nc</arg_value>"
    "</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n'
    '<parameter name="city">Rome</parameter>\n<parameter name="days">3</parameter>\n'
    '</invoke>\n<invoke name="note"><parameter name="text">a <b>\nc</parameter>'
    "</invoke>\n</minimax:tool_call>",
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}'
    '[TOOL_CALLS]note[ARGS]{"text": "a <b>\\nc"}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Rome", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>note'
    '<｜tool▁sep｜>{"text": "a <b>\\nc"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}


def split(name, text, size=None):
    """(said, calls) of a text that arrives in pieces."""
    if name == "harmony":
        _, said, calls = channels(text, size)
        return said, calls
    splitter, size = ToolSplit(DIALECTS[name], TOOLS), size or len(text) or 1
    found = [
        splitter.feed(text[at : at + size]) for at in range(0, len(text), size)
    ] + [splitter.feed("", is_last=True)]
    return "".join(said for said, _ in found), [c for _, calls in found for c in calls]


def grammar_of(name, tools, tokenizer, is_parallel=True) -> str:
    rules = Rules(tokenizer.special_id)
    return rules.grammar(DIALECTS[name].calls(tools, is_parallel, rules))


# The others: gpt-oss's harmony has channels for all of a text.
BLOCKS = [name for name in DIALECTS if name != "harmony"]


@pytest.mark.parametrize("name", BLOCKS)
def test_calls_are_read_however_they_arrive(name):
    for size in (1, 2, 5, 1000):
        assert split(name, WRITTEN[name], size) == ("", [ROME, NOTED])
        assert split(name, "I look.\n\n" + WRITTEN[name], size) == (
            "I look.",
            [ROME, NOTED],
        )


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_no_call_is_text(name):
    opening, written = DIALECTS[name].opening, WRITTEN[name]
    texts = ["", "plain < text [ and 3 > 2", opening, opening + " what?"]
    texts += [written[: len(written) // 4], written.replace("get_weather", "other")]
    for text in texts:
        for size in (1, 3, 1000):
            said, calls = split(name, text, size)
            assert (said.strip(), calls) == (text.strip(), [])
    said, calls = split(name, written[:-30])  # the second one is cut
    assert calls == [ROME]


@pytest.mark.parametrize("name", BLOCKS)
def test_texts_of_a_call_may_hold_its_marks(name):
    begin, end = DIALECTS[name].begin, DIALECTS[name].end
    marks = f"{begin} {end} {begin}"
    written = WRITTEN[name].replace("a <b>", marks)
    noted = ToolCall("note", NOTED.arguments.replace("a <b>", marks))
    for size in (1, 3, 1000):
        assert split(name, written, size) == ("", [ROME, noted])


@pytest.mark.parametrize("name", BLOCKS)
def test_first_call_is_known_before_the_second_is_whole(name):
    splitter, calls = ToolSplit(DIALECTS[name], TOOLS), []
    at = WRITTEN[name].index("note")
    for letter in WRITTEN[name][: at + 5]:
        calls += splitter.feed(letter)[1]
    assert calls == [ROME]


@pytest.mark.parametrize("name", DIALECTS)
def test_random_tokens_under_the_grammar_make_calls(name, tokenizer):
    spec = grammar_of(name, [WEATHER, STOP], tokenizer)
    grammar = Grammars(tokenizer, V, (EOS,)).compile(GrammarSpec("lark", spec, "f"))
    rng, whole, names = np.random.default_rng(0), 0, set()
    for _ in range(12):
        guide, ids, bits_W = grammar.guide(), [], np.zeros(-(-V // 32), np.uint32)
        while len(ids) < 400 and EOS not in ids:
            guide.fill(bits_W)
            bits = np.unpackbits(bits_W.view(np.uint8), bitorder="little")[:V]
            can = np.flatnonzero(bits)
            ids.append(EOS if EOS in can and len(ids) > 20 else int(rng.choice(can)))
            guide.accept(ids[-1])
        said, calls = split(name, tokenizer.decode(ids))
        if ids[-1] == EOS:
            whole += 1
            assert calls and not said
        names |= {call.name for call in calls}
        for call in calls:
            arguments = json.loads(call.arguments)
            if call.name == "get_weather":
                assert arguments["city"] in ("Rome", "Bonn")
                assert type(arguments["days"]) is int
    assert whole >= 4 and names == {"get_weather", "stop"}


@pytest.mark.parametrize("name", DIALECTS)
def test_schemas_of_arguments_may_have_definitions(name, tokenizer):
    schema = {
        "type": "object",
        "$defs": {"day": {"enum": ["Monday"]}},
        "properties": {"day": {"$ref": "#/$defs/day"}, "at": {"const": "noon"}},
        "required": ["day", "at"],
    }
    schema["properties"]["at"]["type"] = "string"
    spec = grammar_of(name, [Tool("f", schema, {})], tokenizer, is_parallel=False)
    guide = (
        Grammars(tokenizer, V, (EOS,)).compile(GrammarSpec("lark", spec, "f")).guide()
    )
    ids, bits_W = [], np.zeros(-(-V // 32), np.uint32)
    while EOS not in ids:
        guide.fill(bits_W)
        bits = np.unpackbits(bits_W.view(np.uint8), bitorder="little")[:V]
        can = np.flatnonzero(bits)
        ids.append(EOS if EOS in can else int(can[-1]))
        guide.accept(ids[-1])
    splitter = {"f": Tool("f", schema, {})}
    text = tokenizer.decode(ids)
    if name == "harmony":
        *_, calls = HarmonySplit(splitter).feed(text, is_last=True)
    else:
        _, calls = ToolSplit(DIALECTS[name], splitter).feed(text, is_last=True)
    assert json.loads(calls[0].arguments) == {"day": "Monday", "at": "noon"}


@pytest.mark.parametrize("name", DIALECTS)
def test_schemas_that_are_none_are_refused(name, tokenizer):
    schema = {"properties": {"a": {"type": "string", "enum": 5}}}
    spec = grammar_of(name, [Tool("f", schema, {})], tokenizer)
    with pytest.raises(ApiError, match="enum must be an array"):
        Grammars(tokenizer, V, (EOS,)).compile(GrammarSpec("lark", spec, "tool_choice"))


def channels(text, size=None):
    """(thought, said, calls) of harmony's text in pieces."""
    splitter, size = HarmonySplit(TOOLS), size or len(text) or 1
    found = [splitter.feed(text[at : at + size]) for at in range(0, len(text), size)]
    found.append(splitter.feed("", is_last=True))
    thought, said = ("".join(each[i] for each in found) for i in (0, 1))
    return thought, said, [call for *_, calls in found for call in calls]


HARMONY = [
    (
        "<|channel|>analysis<|message|>I <think>.<|end|><|start|>assistant<|channel|>"
        "final<|message|>Yes < no",
        ("I <think>.", "Yes < no", []),
    ),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to="
        'functions.get_weather <|constrain|>json<|message|>{"city": "Rome", "days": 3}',
        ("a", "I look.", [ROME]),
    ),
    (
        "<|start|>assistant to=functions.note<|channel|>commentary json<|message|>"
        '{"text": "a <b>\\nc"}<|call|>',
        ("", "", [NOTED]),
    ),
    ("Plain text.", ("", "Plain text.", [])),
    ("<|channel|>final<|message|>", ("", "", [])),
    # Cut within a header, by max_tokens.
    ("<|channel|>fin", ("", "", [])),
    ("<|channel|>analysis<|message|>a<|end|><|start|>", ("a", "", [])),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant", ("a", "", [])),
    ("<|channel|>commentary to=functions.stop<|message|>", ("", "", [])),
    ("assistant to", ("", "assistant to", [])),
    ("<|r", ("", "<|r", [])),
    (
        "<|channel|>commentary to=functions.other<|message|>{}<|call|>",
        ("", "<|channel|>commentary to=functions.other<|message|>{}", []),
    ),
    ("", ("", "", [])),
]


@pytest.mark.parametrize("text, wanted", HARMONY)
def test_channels_of_harmony_are_told_apart(text, wanted):
    for size in (1, 2, 5, 1000):
        assert channels(text, size) == wanted
    thought, said, calls = HarmonySplit(TOOLS).feed(text, is_last=True)  # no stream
    assert (thought, said, calls) == wanted


def test_harmony_of_a_template_is_read_without_tools_too(model, tokenizer):
    source = "{{ messages[0].content }}{# <|channel|> <|message|> functions #}"
    template = ChatTemplate(source, "x")
    assert template.dialect.name == "harmony"
    request = read_chat(body_of(messages=USER, max_tokens=90), model)
    prompts = request.encode(model, template)
    text = "<|channel|>analysis<|message|>a<|end|>"
    tokens = tokenizer.encode(text.replace("<|end|>", ""), begin=False, end=False)
    message = play(request, prompts, model, [*tokens, EOS], False)["choices"][0]
    assert message["message"]["reasoning_content"] == "a"


def test_dialect_is_the_templates_or_the_named_one():
    assert find_dialect("{{ tools }} <minimax:tool_call>").name == "minimax"
    assert find_dialect("{{ tools }} <tool_call><arg_key>").name == "glm"
    assert find_dialect("{{ tools }} <tool_call><function=").name == "qwen_xml"
    assert find_dialect("{{ tools }} <tool_call>").name == "hermes"
    assert find_dialect("<tool_call>") is None  # it takes none
    assert find_dialect("{{ tools }}") is None
    assert find_dialect("{{ messages }}", "mistral").name == "mistral"
    with pytest.raises(Exception, match="unknown tool parser 'hermez'.*hermes"):
        find_dialect("", "hermez")


USER = [{"role": "user", "content": "How is Rome?"}]
OFFER = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "stop", "description": "Ends."}},
]
PLAIN = find_template(None)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_has_calls_apart(tokenizer, stream):
    asked = model_of(tokenizer, max_context=400)
    request = read_chat(body_of(messages=USER, tools=OFFER, stream=stream), asked)
    (prompt,) = request.encode(asked, PLAIN)
    assert '"get_weather"' in prompt.text and prompt.grammar is None
    text = 'I look. <tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    tokens = [*tokenizer.encode(text, begin=False, end=False), EOS]
    found = play(request, request.encode(asked, PLAIN), asked, tokens, stream)
    if stream:
        parts = [c["choices"][0] for c in found if c and c["choices"]]
        said = "".join(part["delta"].get("content") or "" for part in parts)
        calls = [c for part in parts for c in part["delta"].get("tool_calls", ())]
        assert calls[0]["index"] == 0
        reason = parts[-1]["finish_reason"]
    else:
        message = found["choices"][0]["message"]
        said, calls = message["content"], message["tool_calls"]
        assert "index" not in calls[0]
        reason = found["choices"][0]["finish_reason"]
    assert (said, reason) == ("I look.", "tool_calls")
    assert [call["function"] for call in calls] == [{"name": "stop", "arguments": "{}"}]
    assert calls[0]["id"].startswith("call_") and calls[0]["type"] == "function"


def test_one_call_where_parallel_ones_are_not_wanted(tokenizer):
    asked = model_of(tokenizer, max_context=600)
    given = {"messages": USER, "tools": OFFER, "parallel_tool_calls": False}
    request = read_chat(body_of(**given), asked)
    text = 2 * '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    tokens = [*tokenizer.encode(text, begin=False, end=False), EOS]
    body = play(request, request.encode(asked, PLAIN), asked, tokens, False)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


def test_required_and_named_tools_are_a_grammar(tokenizer):
    asked = model_of(tokenizer)
    named = {"type": "function", "function": {"name": "stop"}}
    for choice, names in (("required", {"get_weather", "stop"}), (named, {"stop"})):
        given = {"messages": USER, "tools": OFFER, "tool_choice": choice}
        (prompt,) = read_chat(body_of(**given), asked).encode(
            model_of(tokenizer, max_context=600, grammars=asked.grammars), PLAIN
        )
        assert {
            n for n in ("get_weather", "stop") if n in prompt.grammar.value
        } == names
        asked.grammars.compile(prompt.grammar)
    given["tool_choice"] = "none"
    (prompt,) = read_chat(body_of(**given), asked).encode(asked, PLAIN)
    assert prompt.reading is None and "Tools" not in prompt.text


@pytest.mark.parametrize(
    "asked, pattern",
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "a/[b-d]"}}, "a/[b-d]"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ],
)
def test_answer_is_a_call_or_of_the_format(tokenizer, asked, pattern):
    model = model_of(tokenizer, max_context=600)
    given = {"messages": USER, "tools": OFFER, **asked}
    (prompt,) = read_chat(body_of(**given), model).encode(model, PLAIN)
    (field,) = asked
    assert prompt.grammar.field.startswith(field)
    guide = model.grammars.compile(prompt.grammar).guide
    text = "a/c" if "regex" in str(asked) else "no" if "choice" in str(asked) else "{}"
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    for words in (text, call):
        row, bits_W = guide(), np.zeros(-(-V // 32), np.uint32)
        for token in [*tokenizer.encode(words, begin=False, end=False), EOS]:
            row.fill(bits_W)
            assert bits_W[token // 32] >> token % 32 & 1, words
            row.accept(token)
    row = guide()
    row.fill(bits_W)
    (other,) = tokenizer.encode("w", begin=False, end=False)
    assert not bits_W[other // 32] >> other % 32 & 1
    # What must be a call has no other format.
    given["tool_choice"] = "required"
    (prompt,) = read_chat(body_of(**given), model).encode(model, PLAIN)
    assert prompt.grammar.field == "tool_choice"
    # A format that cannot be enforced is refused under its own name.
    bad = {"tools": OFFER, "structured_outputs": {"regex": "("}}
    with pytest.raises(ApiError) as caught:
        request = read_chat(body_of(messages=USER, **bad), model)
        model.grammars.compile(request.encode(model, PLAIN)[0].grammar)
    assert caught.value.param == "structured_outputs.regex"


def test_earlier_calls_and_results_reach_the_template(model):
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    # As openai's client has them in an answer that it read.
    call["index"], call["function"]["parsed_arguments"] = 0, {"city": "Rome"}
    talk = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "parsed": {}},
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
    ]
    source = (
        "{{ messages[1].tool_calls[0].function.arguments.city }} "
        "{{ messages[2].tool_call_id }} {{ messages[2].content }}"
    )
    (prompt,) = read_chat(body_of(messages=talk), model).encode(
        model, ChatTemplate(source, "x")
    )
    assert prompt.text == "Rome c1 dry"
    assert PLAIN.render(read_chat(body_of(messages=talk), model).messages) == (
        "User: How is Rome?\n\nAssistant: <tool_call>"
        '{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>\n\n'
        "Tool: dry\n\nAssistant:"
    )


def tool(**function):
    return [{"type": "function", "function": {"name": "a"} | function}]


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"tools": "a"}, "tools", "a list of at most 128 tools"),
        ({"tools": [{"type": "x"}]}, "tools[0]", '"type": "function"'),
        ({"tools": tool(name="a b")}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": tool() * 2}, "tools[1].function.name", "another name"),
        (
            {"tools": tool(parameters={"type": "array"})},
            "tools[0].function.parameters",
            'a JSON schema of type "object"',
        ),
        (
            {"tools": tool(parameters={"properties": []})},
            "tools[0].function.parameters.properties",
            "expected an object",
        ),
        ({"tools": tool(x=1)}, "tools[0].function.x", "unknown parameter"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tools": tool(), "tool_choice": "any"}, "tool_choice", "one of none, auto"),
        (
            {"tools": tool(), "tool_choice": {"function": {"name": "a"}, "x": 1}},
            "tool_choice.x",
            "unknown parameter",
        ),
        (
            {
                "tools": tool(),
                "tool_choice": {"type": "function", "function": {"name": "b"}},
            },
            "tool_choice",
            "names 'b', which no tool is",
        ),
        (
            {"tools": tool(), "tool_choice": "required", "ignore_eos": True},
            "tool_choice",
            "leave one out",
        ),
    ],
)
def test_fields_of_tools_are_refused_by_name(tokenizer, fields, param, message):
    asked = model_of(tokenizer)
    with pytest.raises(ApiError, match=message) as caught:
        read_chat(body_of(messages=USER, **fields), asked)
    assert caught.value.param == param


def test_templates_that_take_no_tools_say_so(model):
    request = read_chat(body_of(messages=USER, tools=OFFER), model)
    with pytest.raises(ApiError, match="takes no tools, .* --tool_parser") as caught:
        request.encode(model, ChatTemplate("{{ messages[0].content }}", "x"))
    assert caught.value.param == "tools"
