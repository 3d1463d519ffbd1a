"""What the text of a tool call looks like in a family's dialect.

A dialect reads whole calls out of text, and writes a grammar (llguidance's Lark) of
text that has them, for requests that demand a call. A call that cannot be read is text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from moe_edge.core.json_reader import parse_json

# White space between the parts of a JSON text: nothing, a space, or a new line and its
# indent. A model that may write any would perhaps write nothing else, and never end.
WHITE_SPACE = r"(\x20?|\x0A[\x20\x09]{0,32})"


class Tool(NamedTuple):
    """A function that a client offers.

    Attributes:
      parameters: JSON schema of its arguments.
      given: as the request has it, for the chat template.
    """

    name: str
    parameters: Mapping[str, Any]
    given: Mapping[str, Any]

    def schema_of(self, parameter: str) -> Mapping[str, Any]:
        """Of an argument; empty if there is none."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def closed(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema made of parts of `parameters`, with the definitions it refers to."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        names = [n for n in ("$defs", "definitions") if n in self.parameters]
        return {name: self.parameters[name] for name in names} | dict(schema)


class ToolCall(NamedTuple):
    """A call that a model made; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


def enforced_part(schema: Any) -> Any:
    """A schema without the words that only describe it, which may be long."""
    if isinstance(schema, list):
        return [enforced_part(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value if name in ("const", "enum") else enforced_part(value)
        for name, value in schema.items()
        if not (name in ("title", "description", "$comment") and isinstance(value, str))
    }


class Rules:
    """Rules of a Lark grammar, as they are written.

    Args:
      special: number of a text that is a special token; None: it is plain text.
    """

    def __init__(self, special: Callable[[str], int | None]):
        self._special, self._lines = special, []

    def literal(self, text: str) -> str:
        """A text, which may be a special token; empty for none."""
        if not text:
            return ""
        number = self._special(text)
        return json.dumps(text) if number is None else f"<[{number}]>"

    def add(self, text: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"part{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {text}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for JSON that follows a schema."""
        guided = enforced_part(schema)
        guided = {**guided, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        return self.add(f"%json {json.dumps(guided)}")

    def regex(self, pattern: str) -> str:
        """The name of a rule for text of a pattern."""
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern)
        return self.add("/" + escaped.replace("\n", r"\n") + "/")

    def choice(self, texts: Sequence[str]) -> str:
        """The name of a rule for one of some texts."""
        return self.add(" | ".join(map(json.dumps, texts)))

    def until(self, text: str) -> str:
        """The name of a rule for anything up to a text, and that text."""
        return self.add("/(?s:.*)/", f"[suffix={json.dumps(text)}]")

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines])


class Dialect:
    """A family's way to write calls; without state.

    Attributes:
      name: that `--tool_parser` takes.
      mark: a text in chat templates that names the dialect.
      begin, end: texts around one call; `end` empty: it ends with the answer, or where
        the next one begins.
      around: texts around all calls of an answer, if there are any.
      opaque: pattern of a part of a call, or of the beginning of one that goes on, in
        which `end` ends nothing.
    """

    name: ClassVar[str]
    mark: ClassVar[str]
    begin: ClassVar[str]
    end: ClassVar[str]
    around: ClassVar[tuple[str, str]] = ("", "")
    opaque: ClassVar[str] = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*(?:["\n]|\\?\Z)'  # JSON's text

    @property
    def opening(self) -> str:
        """The text with which calls begin."""
        return self.around[0] or self.begin

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that tell calls from other text, of which tokens may be special."""
        return tuple(filter(None, (*self.around, self.begin, self.end)))

    def split_end(self, text: str) -> tuple[str, str, str]:
        """A text in front of the end of a call, that end, and the rest; as `partition`.

        Args:
          text: behind `begin`.
        """
        end = self.end or self.begin
        if end not in text:
            return text, "", ""
        for part in re.finditer(f"(?s:{self.opaque})|{re.escape(end)}", text):
            if part[0] == end:
                return text[: part.start()], end, text[part.end() :]
        return text, "", ""

    def read(self, text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
        """The call between `begin` and `end`; None: it is none of these tools'."""
        raise NotImplementedError

    def body(self, tool: Tool, rules: Rules) -> str:
        """Lark of what stands between `begin` and `end` of a call of a tool."""
        raise NotImplementedError

    def calls(self, tools: Sequence[Tool], is_parallel: bool, rules: Rules) -> str:
        """Lark of an answer of one call, or of one and more."""
        begin, end = rules.literal(self.begin), rules.literal(self.end)
        calls = [rules.add(f"{begin} {self.body(tool, rules)} {end}") for tool in tools]
        call = rules.add(" | ".join(calls))
        more = rf"( /\n?/ {call} )*" if is_parallel else ""
        before, after = map(rules.literal, self.around)
        return rf"{before} /\n?/ {call} {more} /\n?/ {after}"


class NameFirst(Dialect):
    """A call is a tool's name, a text between, and its arguments as JSON.

    Attributes:
      middle: the text between.
    """

    middle: ClassVar[str]

    @property
    def markers(self) -> tuple[str, ...]:
        return (*super().markers, self.middle)

    def read(self, text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
        name, _, arguments = text.partition(self.middle)
        return call_of(name.strip(), arguments, tools)

    def body(self, tool: Tool, rules: Rules) -> str:
        name, middle = rules.literal(tool.name), rules.literal(self.middle)
        return f"{name} {middle} {rules.json(tool.parameters)}"


def read_object(text: str) -> dict[str, Any] | None:
    """A JSON object; None if it is none."""
    found = json_value(text)
    return found if isinstance(found, dict) else None


def json_value(text: str, otherwise: Any = None) -> Any:
    """The value of a JSON text that a model wrote; `otherwise` if it is none."""
    try:
        return parse_json("a call", text, ValueError)
    except ValueError:
        return otherwise


def call_of(name: Any, arguments: Any, tools: Mapping[str, Tool]) -> ToolCall | None:
    """A call of one of some tools; its arguments an object, or the text of one."""
    if isinstance(arguments, str):
        arguments = read_object(arguments)
    if not isinstance(name, str) or name not in tools:
        return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
