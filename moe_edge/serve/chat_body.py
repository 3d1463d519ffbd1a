"""Requests of /v1/chat/completions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moe_edge.serve.body import (
    IGNORED,
    NEUTRAL,
    TOP_LOGPROBS,
    Body,
    Encoded,
    check_rows,
    common_readers,
    common_values,
    encode,
)
from moe_edge.serve.chat_template import RESERVED, ChatTemplate
from moe_edge.serve.errors import ApiError, bad_value, shown
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
from moe_edge.serve.grammar import GrammarSpec, rule_of
from moe_edge.serve.reading import Reading
from moe_edge.serve.reasoning import reasoning_after
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.tool_fields import (
    ToolChoice,
    calls_reader,
    chat_tool,
    chosen_tools,
    tool_choice_reader,
    tools_reader,
)
from moe_edge.serve.tools.base import Dialect, Rules, Tool

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
Message = dict[str, Any]  # role, content and perhaps name, reasoning_content, calls

_NEUTRAL = NEUTRAL | {
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "verbosity": "medium",
    # Their default is none at all.
    **dict.fromkeys(("audio", "prediction", "web_search_options")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatBody(Body):
    """A valid request for the next message of a conversation."""

    PROMPT: ClassVar[str] = "messages"

    messages: tuple[Message, ...]
    template_variables: Mapping[str, Any]  # such as enable_thinking
    reasoning_effort: str | None  # that the template is told
    tools: tuple[Tool, ...]  # that the answer may call
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    # Where there are tools, what an answer without calls follows.
    tool_format: GrammarSpec | None = None

    def encode(self, model: ServedModel, template: ChatTemplate) -> list[Encoded]:
        """The one prompt; see `body.encode`: for a thread.

        Raises:
          ApiError: also invalid_value: messages that the template refuses;
            unsupported_parameter: an effort that it does not know.
        """
        variables = dict(self.template_variables)
        if "reasoning_effort" in template.source:
            if self.reasoning_effort is not None:
                variables["reasoning_effort"] = self.reasoning_effort
        elif self.reasoning_effort not in (None, "medium"):  # the API's default
            raise ApiError(
                "unsupported_parameter",
                f"the chat template ({template.name}) has no reasoning_effort; leave "
                "it out",
                param="reasoning_effort",
            )
        tools = [tool.given for tool in self.tools]
        dialect = self._dialect(template)
        prompt = template.render(self.messages, variables=variables, tools=tools)
        # The answer goes on where the prompt stops, so no end token is added.
        begin = template.adds_special
        (encoded,) = encode(self, [prompt], model, begin=begin, end=False)
        reasoning = reasoning_after(prompt, template.markers)
        if reasoning is None and dialect is None and not template.is_harmony:
            return [encoded]
        reading = Reading(
            reasoning,
            dialect,
            {tool.name: tool for tool in self.tools},
            self.parallel_tool_calls,
            template.is_harmony,
        )
        grammar = dialect and self._grammar(dialect, model)
        return [encoded._replace(reading=reading, grammar=grammar)]

    def _grammar(self, dialect: Dialect, model: ServedModel) -> GrammarSpec | None:
        """Of calls if one is required, of calls or the format where that is given."""
        is_free = self.tool_choice.kind == "auto"
        if is_free and self.tool_format is None:
            return None
        rules = Rules(model.tokenizer.special_id)
        start, field = dialect.calls(self.tools, self.parallel_tool_calls, rules), ""
        if is_free:
            start += f" | {rule_of(self.tool_format, rules)}"
            field = self.tool_format.field
        return GrammarSpec("lark", rules.grammar(start), field or "tool_choice")

    def _dialect(self, template: ChatTemplate) -> Dialect | None:
        """How the template's model writes calls; None where there are no tools."""
        if self.tools and template.dialect is None:
            raise ApiError(
                "unsupported_parameter",
                f"the chat template ({template.name}) takes no tools, or its model "
                "writes calls in an unknown way; leave tools out, or start the server "
                "with --tool_parser",
                param="tools",
            )
        return template.dialect if self.tools else None


def read_chat(body: bytes, model: ServedModel) -> ChatBody:
    """Reads and checks a body.

    Raises:
      ApiError: what is wrong with it, by the field's name.
    """
    readers = common_readers(model) | {
        "messages": messages_reader(model),
        "max_tokens": whole(1, 2**31 - 1),  # the context bounds both further
        "max_completion_tokens": whole(1, 2**31 - 1),
        "logprobs": flag,
        "top_logprobs": TOP_LOGPROBS,
        "chat_template_kwargs": template_variables,
        "reasoning_effort": one_of(*EFFORTS),
        "tools": tools_reader(chat_tool, "function.name"),
        "tool_choice": tool_choice_reader,
        "parallel_tool_calls": flag,
    }
    values = read_fields(read_object(body), readers, _NEUTRAL, IGNORED)
    if "messages" not in values:
        raise bad_value("messages", "there are no messages; give one")
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if None not in (old, new) and old != new:
        raise bad_value(
            "max_tokens",
            f"max_tokens {old} and max_completion_tokens {new} differ; give one",
        )
    wants, top = values.get("logprobs", False), values.get("top_logprobs")
    if top is not None and not wants:
        raise bad_value(
            "top_logprobs", f"top_logprobs {top} without logprobs: true; add it"
        )
    given = chat_values(values, model)
    check_rows(given["n"], top)
    return ChatBody(
        messages=values["messages"],
        reasoning_effort=values.get("reasoning_effort"),
        max_new_tokens=old if new is None else new,
        top_logprobs=(top or 0) if wants else None,
        **given,
    )


def chat_values(values: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """Arguments of `ChatBody` that both routes of conversations read alike.

    Raises:
      ApiError: fields that contradict each other.
    """
    common = common_values(values, model)
    tools, choice = chosen_tools(values)
    # With tools the grammar of an answer has their calls, too.
    format = common.pop("grammar")
    return common | {
        "template_variables": values.get("chat_template_kwargs", {}),
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "tool_format" if tools else "grammar": format,
    }


def messages_reader(model: ServedModel) -> Reader:
    """Of a conversation: one message of text or more."""

    def read(name: str, value: Any) -> tuple[Message, ...]:
        if not isinstance(value, list) or not value:
            raise invalid(name, value, "a list of messages")
        check_number(name, value, model)
        return tuple(_message(f"{name}[{i}]", each) for i, each in enumerate(value))

    return read


def check_number(name: str, messages: list[Any], model: ServedModel) -> None:
    """Refuses more messages than a context holds if each takes one token."""
    if len(messages) > model.max_context:
        raise ApiError(
            "context_length_exceeded",
            f"{len(messages)} messages exceed the context of {model.max_context} "
            "tokens; leave out the oldest",
            param=name,
        )


def template_variables(path: str, value: Any) -> dict[str, Any]:
    """Variables for the chat template, under vLLM's name."""
    if not isinstance(value, dict):
        raise invalid(path, value, 'an object such as {"enable_thinking": false}')
    for name in value:
        at = f"{path}.{shown(name)[1:-1]}"
        if name in RESERVED:
            raise bad_value(
                at, f"{at} is a field of the request itself; leave it out here"
            )
        if not name.isidentifier():
            raise bad_value(
                at, f"{at} is no name of a template's variable; leave it out"
            )
    return value


# `type` is what lm-eval adds to every message.
_MESSAGE_NEUTRAL = {"type": "text"} | dict.fromkeys(
    ("audio", "refusal", "function_call", "annotations")
)


def _message(path: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise invalid(path, value, "an object with role and content")
    readers = {
        "role": one_of("system", "developer", "user", "assistant", "tool"),
        "content": content_reader("text"),
        "name": text,
        "reasoning_content": text,
        "tool_calls": calls_reader,
        "tool_call_id": text,
    }
    ignored = ("parsed",)  # what openai's client made of the content
    values = read_fields(value, readers, _MESSAGE_NEUTRAL, ignored, f"{path}.")
    if values.get("tool_calls"):
        values.setdefault("content", "")
    else:
        values.pop("tool_calls", None)
    for name in ("role", "content"):
        if name not in values:
            raise bad_value(f"{path}.{name}", f"{path} has no {name}")
    return values


def content_reader(*kinds: str) -> Reader:
    """Of a text, or the lines of its parts: a model of text has no other parts."""

    def read(path: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise invalid(path, value, "a string, or a list of parts of text")
        return "\n".join(
            part_text(f"{path}[{i}]", part, kinds) for i, part in enumerate(value)
        )

    return read


def part_text(path: str, part: Any, kinds: Sequence[str]) -> str:
    """The text of a part of one of some kinds."""
    expected = f'a part {{"type": "{kinds[0]}", "text": ..}}'
    if not isinstance(part, dict):
        raise invalid(path, part, expected)
    ignored = ("annotations", "logprobs") if len(kinds) > 1 else ()
    readers = {"type": one_of(*kinds), "text": text}
    values = read_fields(part, readers, ignored=ignored, within=f"{path}.")
    if set(values) != {"type", "text"}:
        raise invalid(path, part, expected)
    return values["text"]
