"""Fields of tools: what a client offers, which choice it leaves, calls of before."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_edge.serve.errors import ApiError, bad_value
from moe_edge.serve.fields import Reader, flag, invalid, one_of, read_fields, text
from moe_edge.serve.tools.base import Tool, json_value

MOST_TOOLS = 128  # OpenAI's
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ToolChoice(NamedTuple):
    """Which tools an answer may, or must, call.

    Attributes:
      kind: "none", "auto" or "required".
      name: of the one tool that is required; None: any of them.
    """

    kind: str
    name: str | None = None


def tools_reader(one: Reader, name_at: str) -> Reader:
    """Of the functions that a model may call.

    Args:
      one: reads a tool; name_at: where in it its name stands.
    """

    def read(name: str, value: Any) -> tuple[Tool, ...]:
        if not isinstance(value, list) or len(value) > MOST_TOOLS:
            raise invalid(name, value, f"a list of at most {MOST_TOOLS} tools")
        tools = tuple(one(f"{name}[{i}]", each) for i, each in enumerate(value))
        names = [tool.name for tool in tools]
        for i, each in enumerate(names):
            if each in names[:i]:
                raise invalid(f"{name}[{i}].{name_at}", each, "another name")
        return tools

    return read


def chat_tool(path: str, value: Any) -> Tool:
    """A tool of a chat, its function within."""
    if not isinstance(value, dict) or value.get("type") != "function":
        raise invalid(path, value, 'an object {"type": "function", "function": {..}}')
    readers = {"type": text, "function": function_reader}
    found = read_fields(value, readers, within=f"{path}.").get("function")
    if found is None:
        raise invalid(path, value, 'an object {"type": "function", "function": {..}}')
    return tool_of(found, value)


def tool_of(found: Mapping[str, Any], given: Mapping[str, Any]) -> Tool:
    """A tool by the fields of its function; `given` is for chat templates."""
    schema = found.get("parameters", {"type": "object", "properties": {}})
    return Tool(found["name"], schema, given)


def function_reader(path: str, value: Any) -> dict[str, Any]:
    """The fields of a function."""
    if not isinstance(value, dict):
        raise invalid(path, value, "an object with a name")
    readers = {
        "name": text,
        "description": text,
        "strict": flag,
        "parameters": _parameters,
    }
    found = read_fields(value, readers, within=f"{path}.")
    if not _NAME.fullmatch(found.get("name", "")):
        expected = "1 to 64 letters, digits, and _ . -"
        raise invalid(f"{path}.name", found.get("name"), expected)
    return found


def _parameters(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise invalid(path, value, 'a JSON schema of type "object"')
    for key, kind in (("properties", dict), ("required", list)):
        if not isinstance(value.get(key, kind()), kind):
            expected = "an object" if kind is dict else "a list of names"
            raise invalid(f"{path}.{key}", value[key], expected)
    return value


def tool_choice_reader(name: str, value: Any) -> ToolChoice:
    """A text, or the one function to call."""
    if isinstance(value, str):
        return ToolChoice(one_of("none", "auto", "required")(name, value))
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        expected = 'none, auto, required or {"type": "function", "function": {"name"}}'
        raise invalid(name, value, expected)
    read_fields(
        value, {"type": one_of("function"), "function": _named}, within=f"{name}."
    )
    return ToolChoice("required", function["name"])


def _named(path: str, value: Any) -> Any:
    return read_fields(value, {"name": text}, within=f"{path}.")


def chosen_tools(values: Mapping[str, Any]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that an answer may call, and whether it must.

    Raises:
      ApiError: a choice that no tool fits, or that contradicts another field.
    """
    tools: tuple[Tool, ...] = values.get("tools", ())
    choice = values.get("tool_choice") or ToolChoice("auto" if tools else "none")
    if choice.kind == "required" and not tools:
        raise _contradiction(f"tool_choice {choice.kind} without tools; give some")
    if choice.name is not None:
        tools = tuple(tool for tool in tools if tool.name == choice.name)
        if not tools:
            raise _contradiction(f"tool_choice names {choice.name!r}, which no tool is")
    if choice.kind == "none" or not tools:
        return (), ToolChoice("none")
    if choice.kind == "required" and values.get("ignore_eos"):
        raise _contradiction("tool_choice required with ignore_eos; leave one out")
    return tools, choice


def _contradiction(message: str) -> ApiError:
    return bad_value("tool_choice", message)


def calls_reader(path: str, value: Any) -> list[dict[str, Any]]:
    """Calls that an earlier message made, their arguments as objects for templates."""
    if not isinstance(value, list):
        raise invalid(path, value, "a list of calls")
    return [_call(f"{path}[{i}]", each) for i, each in enumerate(value)]


def _call(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(path, value, "a call of a function")
    readers = {"id": text, "type": one_of("function"), "function": _called}
    # Of a stream, which clients send back as it came.
    found = read_fields(value, readers, ignored=("index",), within=f"{path}.")
    if "function" not in found:
        raise invalid(path, value, "a call of a function")
    return {"type": "function"} | found


def _called(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(path, value, "an object with name and arguments")
    readers = {"name": text, "arguments": text}
    ignored = ("parsed_arguments",)  # what openai's client made of them
    found = read_fields(value, readers, ignored=ignored, within=f"{path}.")
    if set(found) != {"name", "arguments"}:
        raise invalid(path, value, "an object with name and arguments")
    arguments = json_value(found["arguments"] or "{}", otherwise=found["arguments"])
    return found | {"arguments": arguments}
