"""Fields by which a request asks for JSON, a pattern or one of some texts.

`response_format` is OpenAI's, `structured_outputs` vLLM's.
"""

from collections.abc import Mapping
from typing import Any

from moe_edge.serve.errors import bad_value
from moe_edge.serve.fields import (
    Reader,
    flag,
    invalid,
    read_fields,
    some_text,
    text,
)
from moe_edge.serve.grammar import GrammarSpec

FORMATS = ("response_format", "structured_outputs")
MOST_CHOICES = 1024
ANY_OBJECT = {"type": "object"}


def response_format(name: str, value: Any) -> GrammarSpec | None:
    """OpenAI's: text, json_object, or json_schema with its schema."""
    kinds = ("text", "json_object", "json_schema")
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in kinds:
        raise invalid(name, value, f"an object whose type is one of {', '.join(kinds)}")
    readers: dict[str, Reader] = {"type": text}
    if kind == "json_schema":
        readers["json_schema"] = _schema_field
    values = read_fields(value, readers, within=f"{name}.")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json", ANY_OBJECT, name)
    if "json_schema" not in values:
        raise bad_value(
            f"{name}.json_schema",
            f'{name} has no json_schema, expected {{"name": .., "schema": {{..}}}}',
        )
    return GrammarSpec("json", values["json_schema"], f"{name}.json_schema.schema")


def _schema_field(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise invalid(name, value, 'an object {"name": .., "schema": {..}}')
    readers = {
        "name": text,
        "description": text,
        "strict": flag,
        "schema": schema_reader,
    }
    # A schema is enforced whether `strict` or not.
    return read_fields(value, readers, within=f"{name}.").get("schema", ANY_OBJECT)


def schema_reader(name: str, value: Any) -> Any:
    """A JSON schema."""
    if not isinstance(value, dict | bool):
        raise invalid(name, value, "a JSON schema")
    return value


def structured_outputs(name: str, value: Any) -> GrammarSpec:
    """vLLM's: one of json (a schema), json_object, regex and choice."""
    if not isinstance(value, dict):
        raise invalid(name, value, 'an object such as {"choice": ["yes", "no"]}')
    readers = {
        "json": schema_reader,
        "json_object": flag,
        "regex": _pattern,
        "choice": _choice,
    }
    values = read_fields(value, readers, within=f"{name}.")
    if values.get("json_object") is False:
        values.pop("json_object")
    if len(values) != 1:
        raise invalid(name, sorted(values), f"exactly one of {', '.join(readers)}")
    ((kind, found),) = values.items()
    if kind == "json_object":
        kind, found = "json", ANY_OBJECT
    return GrammarSpec(kind, found, f"{name}.{kind}")


def _pattern(name: str, value: Any) -> str:
    if not text(name, value):
        raise invalid(name, value, "a regular expression")
    return value


def _choice(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_CHOICES:
        raise invalid(name, value, f"a list of 1 to {MOST_CHOICES} texts")
    return [some_text(f"{name}[{i}]", each) for i, each in enumerate(value)]


def grammar_of(values: Mapping[str, Any], ignore_eos: bool) -> GrammarSpec | None:
    """What the fields of a request ask for; None: any text.

    Raises:
      ApiError: fields that contradict each other.
    """
    given = [name for name in FORMATS if values.get(name) is not None]
    if len(given) > 1:
        raise bad_value(
            "structured_outputs",
            "response_format and structured_outputs both say what the answer is; give "
            "one",
        )
    if given and ignore_eos:
        raise bad_value(
            "ignore_eos",
            f"ignore_eos with {values[given[0]].field}, whose grammar ends with an "
            "end-of-text token; leave one out",
        )
    return values[given[0]] if given else None
