"""Requests of /v1/responses, read as requests for the next message of a chat."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from moe_edge.serve.body import IGNORED, common_readers
from moe_edge.serve.chat_body import (
    EFFORTS,
    ChatBody,
    Message,
    chat_values,
    check_number,
    content_reader,
    template_variables,
)
from moe_edge.serve.errors import bad_value
from moe_edge.serve.fields import (
    Reader,
    flag,
    invalid,
    one_of,
    read_fields,
    read_object,
    text,
    whole,
)
from moe_edge.serve.grammar import GrammarSpec
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.structured import ANY_OBJECT, schema_reader
from moe_edge.serve.tool_fields import (
    ToolChoice,
    calls_reader,
    function_reader,
    tool_of,
    tools_reader,
)
from moe_edge.serve.tools.base import Tool

# Nothing is stored here, so nothing of before can be referred to.
_NEUTRAL = {
    "background": False,
    "include": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    **dict.fromkeys(("conversation", "max_tool_calls", "previous_response_id")),
    **dict.fromkeys(("prompt", "context_management", "moderation")),
}
_IGNORED = (*IGNORED, "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
_SHARED = ("model", "temperature", "top_p", "seed", "stop", "stream", "stream_options")
_OURS = ("min_k", "quality", "deadline_ms", "ignore_eos")
# Of items that an answer had, which clients send back as they came.
_OF_ANSWERS = ("id", "status", "phase", "namespace", "caller", "async", "async_")
_OF_ANSWERS += ("parsed_arguments", "encrypted_content", "summary")
_ECHOED = ("instructions", "metadata", "tools", "tool_choice", "text", "reasoning")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponsesBody(ChatBody):
    """A valid request for a response.

    Attributes:
      given: fields that the response repeats, as they came.
    """

    PROMPT: ClassVar[str] = "input"

    given: Mapping[str, Any]


def read_responses(body: bytes, model: ServedModel) -> ResponsesBody:
    """Reads and checks a body.

    Raises:
      ApiError: what is wrong with it, by the field's name.
    """
    common = common_readers(model)
    readers = {name: common[name] for name in (*_SHARED, *_OURS)} | {
        "input": _input_reader(model),
        "instructions": text,
        "max_output_tokens": whole(1, 2**31 - 1),
        "text": _text,
        "reasoning": _reasoning,
        "chat_template_kwargs": template_variables,
        "tools": tools_reader(_tool, "name"),
        "tool_choice": _tool_choice,
        "parallel_tool_calls": flag,
    }
    given = read_object(body)
    values = read_fields(given, readers, _NEUTRAL, _IGNORED)
    if "input" not in values:
        raise bad_value("input", "there is no input; give some")
    messages = values["input"]
    if "instructions" in values:
        messages = [{"role": "system", "content": values["instructions"]}, *messages]
    values["response_format"] = values.get("text")
    return ResponsesBody(
        messages=tuple(messages),
        reasoning_effort=values.get("reasoning"),
        max_new_tokens=values.get("max_output_tokens"),
        top_logprobs=None,
        given={name: given[name] for name in _ECHOED if given.get(name) is not None},
        **chat_values(values, model),
    )


# Input.


def _input_reader(model: ServedModel) -> Reader:
    """Of a text, or of items: messages, calls, what they gave, and thoughts."""

    def read(name: str, value: Any) -> list[Message]:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise invalid(name, value, "a text or a list of items")
        check_number(name, value, model)
        messages: list[Message] = []
        for i, item in enumerate(value):
            _add(messages, f"{name}[{i}]", item)
        return [{"content": "", **message} for message in messages]

    return read


def _add(messages: list[Message], path: str, item: Any) -> None:
    """Adds what an item says to a conversation.

    Thoughts, words and calls that follow each other are one message.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise invalid(path, item, f"an item of type {', '.join(_ITEMS)}")
    message = _ITEMS[kind](path, item)
    last = messages[-1] if messages else {}
    is_new = "content" in last and "content" in message
    if last.get("role") != "assistant" or message["role"] != "assistant" or is_new:
        messages.append(message)
        return
    for name, value in message.items():
        last[name] = last[name] + value if name == "tool_calls" in last else value


def _fields(path: str, item: Mapping[str, Any], **readers: Reader) -> dict[str, Any]:
    """Values of an item that has all these fields."""
    given = {name: value for name, value in item.items() if name != "type"}
    values = read_fields(given, readers, ignored=_OF_ANSWERS, within=f"{path}.")
    for name in readers:
        if name not in values:
            raise bad_value(f"{path}.{name}", f"{path} has no {name}")
    return values


_content = content_reader("input_text", "output_text", "reasoning_text", "text")


def _message(path: str, item: Mapping[str, Any]) -> Message:
    role = one_of("system", "developer", "user", "assistant")
    return _fields(path, item, role=role, content=_content)


def _call(path: str, item: Mapping[str, Any]) -> Message:
    found = _fields(path, item, call_id=text, name=text, arguments=text)
    call = {"id": found.pop("call_id"), "type": "function", "function": found}
    return {"role": "assistant", "tool_calls": calls_reader(path, [call])}


def _call_output(path: str, item: Mapping[str, Any]) -> Message:
    found = _fields(path, item, call_id=text, output=_content)
    id, said = found["call_id"], found["output"]
    return {"role": "tool", "tool_call_id": id, "content": said}


def _thought(path: str, item: Mapping[str, Any]) -> Message:
    given = {"content": "", **{n: v for n, v in item.items() if v is not None}}
    found = _fields(path, given, content=_content)
    return {"role": "assistant", "reasoning_content": found["content"]}


_ITEMS: dict[str, Callable[[str, Mapping[str, Any]], Message]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _thought,
}


# What is asked for.


def _text(name: str, value: Any) -> GrammarSpec | None:
    """The format of the answer, and how long it is to be."""
    if not isinstance(value, dict):
        raise invalid(name, value, 'an object such as {"format": {"type": "text"}}')
    neutral = {"verbosity": "medium"}
    return read_fields(value, {"format": _format}, neutral, within=f"{name}.").get(
        "format"
    )


def _format(name: str, value: Any) -> GrammarSpec | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        expected = "an object whose type is one of text, json_object, json_schema"
        raise invalid(name, value, expected)
    readers: dict[str, Reader] = {"type": text}
    if kind == "json_schema":
        readers |= {"name": text, "description": text, "strict": flag}
        readers["schema"] = schema_reader
    values = read_fields(value, readers, within=f"{name}.")
    if kind == "text":
        return None
    field = f"{name}.schema" if "schema" in values else name
    return GrammarSpec("json", values.get("schema", ANY_OBJECT), field)


def _reasoning(name: str, value: Any) -> str | None:
    """How much it thinks; all thoughts are told, there is no summary."""
    if not isinstance(value, dict):
        raise invalid(name, value, 'an object such as {"effort": "low"}')
    readers, ignored = {"effort": one_of(*EFFORTS)}, ("summary", "generate_summary")
    found = read_fields(value, readers, ignored=ignored, within=f"{name}.")
    return found.get("effort")


def _tool(path: str, value: Any) -> Tool:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise invalid(path, value, 'an object {"type": "function", "name": ..}')
    function = {name: each for name, each in value.items() if name != "type"}
    found = function_reader(path, function)
    return tool_of(found, {"type": "function", "function": found})


def _tool_choice(name: str, value: Any) -> ToolChoice:
    if isinstance(value, str):
        return ToolChoice(one_of("none", "auto", "required")(name, value))
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        expected = 'none, auto, required or {"type": "function", "name": ..}'
        raise invalid(name, value, expected)
    readers = {"type": one_of("function"), "name": text}
    return ToolChoice(
        "required", read_fields(value, readers, within=f"{name}.")["name"]
    )
