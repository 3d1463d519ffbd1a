"""How a conversation becomes a prompt: the checkpoint's template, a file's, or ours."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.convert.special_tokens import (
    CONFIG,
    read_special_tokens,
    read_tokenizer_config,
)
from moe_edge.core.checks import CheckpointError
from moe_edge.serve.errors import bad_value
from moe_edge.serve.reasoning import markers_of
from moe_edge.serve.template_limits import MOST_CHARACTERS, TooMuch, limits
from moe_edge.serve.template_sandbox import Refusal, Sandbox
from moe_edge.serve.tools.dialects import find_dialect

# For models that were never taught to talk: names, and an empty line between turns.
PLAIN = """\
{%- if tools -%}
Tools, each called by <tool_call>{"name": .., "arguments": {..}}</tool_call>:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}
{% endif -%}
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}


{% endfor -%}
{%- if add_generation_prompt -%}
Assistant:
{%- endif -%}"""

# Variables that a request has by other means.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")

_TRIALS = (("user",), ("system", "user"), ("user", "assistant", "user"))


class ChatTemplate:
    """Renders conversations.

    Args:
      source: in jinja2, as Hugging Face writes them.
      name: where it comes from.
      tokens: special tokens by name, such as `bos_token`.
      adds_special: whether the tokenizer still has to add what it puts before a text;
        templates of checkpoints write that themselves.
      tool_parser: name of the dialect in which the model calls tools.
    Raises:
      CheckpointError: a template that jinja2 cannot read.
    """

    def __init__(
        self,
        source: str,
        name: str,
        tokens: Mapping[str, str] | None = None,
        adds_special: bool = False,
        tool_parser: str = "auto",
    ):
        self.source, self.name, self.adds_special = source, name, adds_special
        self.markers = markers_of(source)
        self.dialect = find_dialect(source, tool_parser)
        self.is_harmony = "<|channel|>" in source and "<|message|>" in source
        self._tokens = dict(tokens or {})
        environment = Sandbox()
        # A template is a program of somebody else: anything may be wrong with it.
        try:
            with limits():
                self._template = environment.from_string(source)
        except Exception as error:
            raise CheckpointError(
                f"chat template of {name}: {str(error)[:200]}; fix it or give "
                "--chat_template FILE"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt of a conversation.

        Args:
          tools: as a request has them.
          variables: further ones of the template, such as `enable_thinking`; none of
            `RESERVED`.
        Raises:
          ApiError: invalid_value: the template refuses these messages, or writes or
            computes too much.
        """
        # Whatever it raises, it could not make a prompt of these messages.
        try:
            with limits():
                return self._prompt(messages, add_generation_prompt, variables, tools)
        except Exception as error:
            raise bad_value(
                "messages",
                f"the chat template ({self.name}) refuses these messages: "
                f"{type(error).__name__}: {str(error)[:200]}",
            ) from error

    def check(self) -> None:
        """Renders a few conversations, so that a broken template shows at the start.

        A template that itself refuses all of them, because of a role perhaps, is not
        broken.

        Raises:
          CheckpointError: it renders none, and fails on one that it does not refuse.
        """
        failure = None
        with limits():
            for roles in _TRIALS:
                try:
                    self._prompt([{"role": role, "content": "Hello"} for role in roles])
                except Refusal:
                    continue
                except Exception as error:
                    failure = error
                else:
                    return
        if failure is not None:
            raise CheckpointError(
                f"chat template of {self.name} renders no short conversation: "
                f"{type(failure).__name__}: {str(failure)[:200]}; fix it or give "
                "--chat_template FILE"
            ) from failure

    def _prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        given = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        size, parts = 0, []
        given = self._tokens | dict(variables or {}) | given
        for part in self._template.generate(given):
            parts.append(part)
            size += len(part)
            if size > MOST_CHARACTERS:
                raise TooMuch(f"more than {MOST_CHARACTERS} characters")
        prompt = "".join(parts)
        prompt.encode("utf-8")
        return prompt


def find_template(
    folder: Path | None,
    file: str | Path | None = None,
    tool_parser: str = "auto",
) -> ChatTemplate:
    """The template of a file if one is given, else the checkpoint's, else a plain one.

    Args:
      folder: of the tokenizer's files; None: there is none.
      tool_parser: see `ChatTemplate`.
    Raises:
      CheckpointError: a template that is broken, or a file that cannot be read.
      OSError: `file` cannot be read.
    """
    template = _find(folder, file, tool_parser)
    template.check()
    return template


def _find(
    folder: Path | None, file: str | Path | None, tool_parser: str
) -> ChatTemplate:
    config = read_tokenizer_config(folder)
    given = {"tokens": read_special_tokens(folder).names, "tool_parser": tool_parser}
    if file is not None:
        return ChatTemplate(_read(Path(file)), str(file), **given)
    own = None if folder is None else folder / "chat_template.jinja"
    if own is not None and own.is_file():
        return ChatTemplate(_read(own), own.name, **given)
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {
            each["name"]: each.get("template")
            for each in source
            if isinstance(each, dict) and isinstance(each.get("name"), str)
        }
        if "default" not in named:
            raise CheckpointError(
                f"{CONFIG} has chat templates {sorted(named)}, expected one named "
                "'default'; give --chat_template FILE"
            )
        source = named["default"]
    if source is None:
        return ChatTemplate(PLAIN, "plain, built in", adds_special=True, **given)
    if not isinstance(source, str):
        raise CheckpointError(
            f"{CONFIG}: chat_template is {source!r:.60}, expected text; give "
            "--chat_template FILE"
        )
    return ChatTemplate(source, CONFIG, **given)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"chat template {path} is not UTF-8 text") from error
