"""How a conversation becomes a prompt: the checkpoint's template, a file's, or ours."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from moe_edge.core.checks import CheckpointError
from moe_edge.core.json_reader import read_json
from moe_edge.serve.errors import ApiError

CONFIG = "tokenizer_config.json"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
MOST_CHARACTERS = 4 << 20  # of a prompt: four times the largest body by default
MOST_TURNS = 100_000  # of all `range` of one rendering

# For models that were never taught to talk: names, and an empty line between turns.
PLAIN = """\
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content }}

{% endfor -%}
{%- if add_generation_prompt -%}
Assistant:
{%- endif -%}"""


class ChatTemplate:
    """Renders conversations.

    Args:
      source: in jinja2, as Hugging Face writes them.
      name: where it comes from.
      tokens: special tokens by name, such as `bos_token`.
      adds_special: whether the tokenizer still has to add what it puts around a text;
        templates of checkpoints write that themselves.
    Raises:
      CheckpointError: a template that jinja2 cannot read.
    """

    def __init__(
        self,
        source: str,
        name: str,
        tokens: Mapping[str, str] | None = None,
        adds_special: bool = False,
    ):
        self.source, self.name, self.adds_special = source, name, adds_special
        self._tokens = dict(tokens or {})
        environment = _Sandbox()
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(
                f"chat template of {name}: {str(error)[:200]}; mend it or give "
                "--chat_template FILE"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a conversation.

        Raises:
          ApiError: invalid_value: the template refuses these messages, or writes too
            much.
        """
        left = [MOST_TURNS]

        def limited(*given) -> range:
            turns = range(*given)
            left[0] -= len(turns)
            if left[0] < 0:
                raise _TooMuch(f"more than {MOST_TURNS} turns of its loops")
            return turns

        size, parts = 0, []
        try:
            for part in self._template.generate(
                **self._tokens,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                range=limited,
            ):
                parts.append(part)
                size += len(part)
                if size > MOST_CHARACTERS:
                    raise _TooMuch(f"more than {MOST_CHARACTERS} characters")
            prompt = "".join(parts)
            prompt.encode("utf-8")
        # A template is a program of somebody else: whatever it raises, it could not
        # make a prompt of these messages.
        except Exception as error:
            raise ApiError(
                "invalid_value",
                f"the chat template ({self.name}) refuses these messages: "
                f"{type(error).__name__}: {str(error)[:200]}",
                param="messages",
            ) from error
        return prompt


class _TooMuch(Exception):
    """A template that would go on for ever, or nearly so."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks for training what the model wrote; nothing here."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What templates of Hugging Face expect, and limits of what they may compute."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=(_Generation, jinja2.ext.loopcontrols),
        )
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        }

    def call_binop(self, context, operator, left, right):
        """Products of numbers of ordinary size only: others fill the memory."""
        for value in (left, right):
            if not isinstance(value, int | float) or abs(value) > 1 << 32:
                raise _TooMuch(f"{operator} of something other than small numbers")
        if operator == "**" and abs(right) > 32:
            raise _TooMuch(f"a power of {right}")
        return super().call_binop(context, operator, left, right)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON without the escapes of HTML that jinja2's own filter writes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def find_template(folder: Path | None, file: str | Path | None = None) -> ChatTemplate:
    """The template of a file if one is given, else the checkpoint's, else a plain one.

    Args:
      folder: of the tokenizer's files; None: there is none.
    Raises:
      CheckpointError: a template or a file of the tokenizer that cannot be read.
      OSError: `file` cannot be read.
    """
    config = read_tokenizer_config(folder)
    tokens = special_tokens(config)
    if file is not None:
        return ChatTemplate(_read(Path(file)), str(file), tokens)
    own = None if folder is None else folder / "chat_template.jinja"
    if own is not None and own.is_file():
        return ChatTemplate(_read(own), own.name, tokens)
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {
            each["name"]: each.get("template")
            for each in given
            if isinstance(each, dict) and isinstance(each.get("name"), str)
        }
        if "default" not in named:
            raise CheckpointError(
                f"{CONFIG} has chat templates {sorted(named)}, expected one named "
                "'default'; give --chat_template FILE"
            )
        given = named["default"]
    if given is None:
        return ChatTemplate(PLAIN, "plain, built in", tokens, adds_special=True)
    if not isinstance(given, str):
        raise CheckpointError(
            f"{CONFIG}: chat_template is {given!r:.60}, expected text; give "
            "--chat_template FILE"
        )
    return ChatTemplate(given, CONFIG, tokens)


def read_tokenizer_config(folder: Path | None) -> dict[str, Any]:
    """tokenizer_config.json of a folder; empty if there is none.

    Raises:
      CheckpointError: it cannot be read.
    """
    if folder is None or not (folder / CONFIG).is_file():
        return {}
    config = read_json(folder / CONFIG, CheckpointError, strict=False)
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} is no JSON object")
    return config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts of special tokens of a tokenizer_config.json."""
    found = {}
    for name in SPECIAL_NAMES:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"chat template {path} is not UTF-8 text") from error
