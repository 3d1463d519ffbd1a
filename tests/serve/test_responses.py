"""/v1/responses: a chat by other names, and events of a stream."""

import json
import re

import pytest

from moe_edge.serve.body import Encoded
from moe_edge.serve.call import Call
from moe_edge.serve.chat_template import find_template
from moe_edge.serve.errors import ApiError
from moe_edge.serve.responses_answer import Items, ResponsesAnswer
from moe_edge.serve.responses_body import read_responses
from tests.support.served import EOS, body_of, model_of, play

PLAIN = find_template(None)
TOOL = {"type": "function", "name": "stop", "description": "Ends."}


def test_items_of_an_answer_come_back_as_messages(model):
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "So."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "stop",
            "arguments": '{"now": true}',
            "namespace": None,
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    request = read_responses(body_of(input=items, instructions="Be brief."), model)
    function = {"name": "stop", "arguments": {"now": True}}
    call = {"id": "call_1", "type": "function", "function": function}
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "reasoning_content": "So.",
            "content": "b",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
        {"role": "user", "content": "c"},
    )


def test_fields_are_those_of_a_chat(model):
    schema = {"type": "object", "properties": {}}
    request = read_responses(
        body_of(
            input="a",
            max_output_tokens=9,
            text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
            tools=[TOOL | {"strict": True}],
            tool_choice={"type": "function", "name": "stop"},
            reasoning={"effort": "low", "summary": "auto"},
            metadata={"a": "b"},
            store=True,
        ),
        model,
    )
    assert (request.max_new_tokens, request.reasoning_effort) == (9, "low")
    assert request.tool_format.value == schema and request.grammar is None
    assert request.tools[0].given["function"]["description"] == "Ends."
    assert request.tool_choice == ("required", "stop")
    assert request.given["metadata"] == {"a": "b"} and "store" not in request.given


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"input": None}, "input", "there is no input"),
        ({"input": []}, "input", "a text or a list of items"),
        ({"input": ["a"] * 200}, "input", "exceed the context of 128"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "an item of type mess"),
        ({"input": [{"role": "user"}]}, "input[0].content", "has no content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "one of input_text",
        ),
        (
            {"input": [{"type": "function_call_output", "output": "a"}]},
            "input[0].call_id",
            "has no call_id",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"messages": []}, "messages", "unknown parameter"),
        ({"text": "a"}, "text", "an object such as"),
        ({"text": {"format": {"type": "x"}}}, "text.format", "whose type is one of"),
        ({"reasoning": "low"}, "reasoning", "an object such as"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", '"type": "function"'),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "another name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "none, auto, required or"),
        (
            {"text": {"format": {"type": "json_object"}}, "ignore_eos": True},
            "ignore_eos",
            "ignore_eos with text.format, whose",
        ),
    ],
)
def test_fields_are_refused_by_name(model, fields, param, message):
    with pytest.raises(ApiError, match=re.escape(message)) as caught:
        read_responses(body_of(**{"input": "a"} | fields), model)
    assert caught.value.param == param


def test_error_within_a_stream_is_an_event(model):
    request = read_responses(body_of(input="a"), model)
    call = Call(request, [Encoded((5,))], model, "/v1/responses", 0.0)
    answer = ResponsesAnswer(call, model)
    answer.start()
    line = answer.error_line(ApiError("engine_error", "a step failed"))
    name, data = line.decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "code": "engine_error",
        "message": "a step failed",
        "param": None,
        "sequence_number": 2,
    }


def test_thoughts_words_and_calls_are_items():
    items, events = Items(), []
    call = {"id": "call_1", "function": {"name": "stop", "arguments": "{}"}}
    for fields in (
        {"reasoning_content": "So"},
        {"reasoning_content": "."},
        {"content": "I st", "tool_calls": []},
        {"content": "op.", "tool_calls": [call, call]},
    ):
        events += items.feed(fields)
    assert items.close() == []
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in items.output] == kinds
    assert {item["status"] for item in items.output} == {"completed"}
    texts = [item["content"][0]["text"] for item in items.output[:2]]
    assert texts == ["So.", "I stop."]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == items.output
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert not any(item.get("content") or item.get("arguments") for item in added)
    places = [e["output_index"] for e in events]
    assert places == sorted(places)


def test_call_of_a_tool_is_an_item(tokenizer):
    asked = model_of(tokenizer, max_context=400)
    request = read_responses(body_of(input="a", tools=[TOOL]), asked)
    text = 'I stop. <tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    tokens = [*tokenizer.encode(text, begin=False, end=False), EOS]
    body = play(request, request.encode(asked, PLAIN), asked, tokens, False)
    said, call = body["output"]
    assert said["content"][0]["text"] == "I stop."
    assert (call["name"], call["arguments"]) == ("stop", "{}")
    assert body["status"] == "completed" and body["tools"] == [TOOL]
