"""Requests of /v1/completions."""

import dataclasses
from typing import Any

from moe_edge.serve.body import (
    IGNORED,
    MOST_ROWS,
    NEUTRAL,
    TOP_LOGPROBS,
    Body,
    Encoded,
    check_rows,
    common_readers,
    common_values,
    encode,
)
from moe_edge.serve.errors import bad_value
from moe_edge.serve.fields import Reader, flag, invalid, read_fields, read_object
from moe_edge.serve.fields import token_ids as read_ids
from moe_edge.serve.served_model import ServedModel

DEFAULT_TOKENS = 16  # OpenAI's
_NEUTRAL = NEUTRAL | {"best_of": 1, "suffix": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionBody(Body):
    """A valid request for completions; `max_new_tokens` 0: only the prompt is shown."""

    prompts: tuple[str | tuple[int, ...], ...]

    def encode(self, model: ServedModel, template: object = None) -> list[Encoded]:
        """As they came, without a template."""
        return encode(self, self.prompts, model)


def read_completion(body: bytes, model: ServedModel) -> CompletionBody:
    """Reads and checks a body.

    Raises:
      ApiError: what is wrong with it, by the field's name.
    """
    readers = common_readers(model) | {
        "prompt": _prompts_reader(model.vocab_size),
        "logprobs": TOP_LOGPROBS,
        "echo": flag,
    }
    values = read_fields(read_object(body), readers, _NEUTRAL, IGNORED)
    if "prompt" not in values:
        raise bad_value("prompt", "there is no prompt; give one")
    common, prompts = common_values(values, model), values["prompt"]
    check_rows(len(prompts) * common["n"], values.get("logprobs"))
    tokens, echo = values.get("max_tokens", DEFAULT_TOKENS), values.get("echo", False)
    if not tokens and not echo:
        raise invalid("max_tokens", 0, "1 or more, or echo: true")
    return CompletionBody(
        prompts=prompts,
        max_new_tokens=tokens,
        top_logprobs=values.get("logprobs"),
        echo=echo,
        **common,
    )


def _prompts_reader(vocab_size: int) -> Reader:
    one = read_ids(vocab_size)

    def read(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not value:
            raise invalid(name, value, "text, token ids, or a list of either")
        if isinstance(value[0], int):
            return (one(name, value),)
        if len(value) > MOST_ROWS:
            raise invalid(name, len(value), f"at most {MOST_ROWS} prompts")
        return tuple(
            each if isinstance(each, str) else one(f"{name}[{i}]", each)
            for i, each in enumerate(value)
        )

    return read
