"""What requests for completions and for chat have in common."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from moe_edge.checkpoint.manifest import REPORT_NAME
from moe_edge.engine.slot_rows import MOST_LOGPROBS
from moe_edge.model.sampling import Sampling
from moe_edge.serve.chat_template import ChatTemplate
from moe_edge.serve.errors import ApiError, bad_value
from moe_edge.serve.fields import (
    Reader,
    flag,
    invalid,
    number,
    read_fields,
    some_text,
    whole,
)
from moe_edge.serve.grammar import GrammarSpec
from moe_edge.serve.reading import Reading
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.structured import (
    FORMATS,
    grammar_of,
    response_format,
    structured_outputs,
)

MOST_CHOICES = 128  # OpenAI's limit of n
# OpenAI's limit of prompts; here of prompts times n, and of these times logprobs.
MOST_ROWS = 2048
MOST_STOPS = 16
MOST_STOP_LETTERS = 400  # of each
MOST_TEMPERATURE = 2.0  # OpenAI's; above it text is noise
# Below, a temperature counts as 0: logits divided by it would leave float32.
LEAST_TEMPERATURE = 1e-4
MOST_DEADLINE_MS = 86_400_000  # a day: whoever waits longer needs no deadline

TOP_LOGPROBS = whole(0, MOST_LOGPROBS)  # what a step reports at most

# Accepted without any effect: they concern OpenAI's own bookkeeping.
IGNORED = ("user", "metadata", "store", "service_tier")
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
}


class Encoded(NamedTuple):
    """A prompt, ready to run."""

    ids: tuple[int, ...]
    text: str | None = None  # as it came; of ids only where it is shown
    reading: Reading | None = None  # how the text after it is read; None: all said
    grammar: GrammarSpec | None = None  # that it follows, beside the request's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body:
    """A valid request, but for the length of its prompts.

    Attributes:
      n: choices for each prompt; choice i draws with `seed` + i.
      floor: least K.
      max_new_tokens: None: as many as fit behind the prompt.
      top_logprobs: likeliest tokens reported with each; None: no log probabilities.
      deadline_s: seconds from arrival; None: none.
      echo: whether the prompt stands before the text.
    """

    PROMPT: ClassVar[str] = "prompt"  # the field that holds it

    n: int
    seed: int
    temperature: float
    top_p: float
    floor: int
    max_new_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    top_logprobs: int | None
    deadline_s: float | None
    stream: bool
    include_usage: bool
    echo: bool = False
    grammar: GrammarSpec | None = None  # that the answer follows; None: none

    def sampling(self, choice: int) -> Sampling:
        """How a choice (from 0, of one prompt) draws."""
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, seed=self.seed + choice
        )

    def encode(self, model: ServedModel, template: ChatTemplate) -> list[Encoded]:
        """Its prompts; takes up to a second of long ones: call it in a thread.

        Raises:
          ApiError: of the function `encode`.
        """
        raise NotImplementedError

    @property
    def score_prompt(self) -> bool:
        """Whether log probabilities of the prompt's own tokens are wanted."""
        return self.echo and self.top_logprobs is not None

    def new_tokens(self, prompt: Encoded, model: ServedModel) -> int:
        """Tokens to compute after a prompt.

        Where none is to be shown 0, or 1 after a prompt of one token: see `Request`.

        Raises:
          ApiError: context_length_exceeded; invalid_value: a prompt without tokens.
        """
        length, most = len(prompt.ids), model.max_context
        if not length:
            raise bad_value(self.PROMPT, "the prompt is empty; expected some text")
        wanted = 1 if self.max_new_tokens is None else self.max_new_tokens
        wanted = max(wanted, 1 if length == 1 else 0)
        if length + wanted > most:
            raise ApiError(
                "context_length_exceeded",
                f"the prompt has {length} tokens, which with {wanted} new ones exceed "
                f"the context of {most}; shorten it or ask for fewer",
                param=self.PROMPT,
            )
        return most - length if self.max_new_tokens is None else wanted


def encode(
    request: Body,
    prompts: Sequence[str | tuple[int, ...]],
    model: ServedModel,
    *,
    begin: bool = True,
    end: bool = True,
) -> list[Encoded]:
    """Prompts as ids, each of a length that fits.

    Long texts take up to a second: call it in a thread (Python's lock is free).

    Args:
      begin, end: whether the tokenizer adds what it puts before and after a text.
    Raises:
      ApiError: context_length_exceeded, invalid_value.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    most = model.longest_text
    for size in (len(each.encode()) for each in texts):
        if most is not None and size > most:  # in whatever tokens
            raise ApiError(
                "context_length_exceeded",
                f"the prompt has {size} bytes, which are more than {model.max_context} "
                "tokens, the context, could hold; shorten it",
                param=request.PROMPT,
            )
    rows = iter(model.tokenizer.encode_batch(texts, begin=begin, end=end))
    encoded = []
    for prompt in prompts:
        is_text = isinstance(prompt, str)
        one = Encoded(tuple(next(rows)), prompt) if is_text else Encoded(prompt)
        request.new_tokens(one, model)
        if request.echo and not is_text:
            one = Encoded(prompt, model.tokenizer.decode(prompt, special=True))
        encoded.append(one)
    return encoded


def check_rows(rows: int, top_logprobs: int | None) -> None:
    """Refuses more rows, or likely tokens of all of them, than an answer holds.

    Raises:
      ApiError: invalid_value.
    """
    if rows > MOST_ROWS:
        message = f"{rows} choices of one request, expected at most {MOST_ROWS}"
    elif rows * (top_logprobs or 0) > MOST_ROWS:
        message = (
            f"{rows} choices with {top_logprobs} likely tokens beside each of theirs, "
            f"expected a product of at most {MOST_ROWS}"
        )
    else:
        return
    raise bad_value("n", f"{message}; send several requests")


def common_readers(model: ServedModel) -> dict[str, Reader]:
    """Readers of the fields that both kinds have."""
    return {
        "model": model.check_id,
        "n": whole(1, MOST_CHOICES),
        # OpenAI's, 64 bits with a sign: what the random key holds.
        "seed": whole(-(2**63), 2**63 - 1),
        "temperature": number(0, MOST_TEMPERATURE),
        "top_p": number(0, 1, above=True),  # 0 would keep no token
        "max_tokens": whole(0, 2**31 - 1),  # the context bounds it further
        "stop": _stop,
        "stream": flag,
        "stream_options": _stream_options,
        "min_k": whole(1, model.own_k),  # more than its own K would be another model
        "quality": number(0, 1, above=True),  # a share of the own K's
        "deadline_ms": number(0, MOST_DEADLINE_MS, above=True),
        "ignore_eos": flag,
        "response_format": response_format,
        "structured_outputs": structured_outputs,
    }


def common_values(values: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """Arguments of `Body` that both kinds read alike.

    Raises:
      ApiError: fields that contradict each other.
    """
    get, ignore_eos = values.get, values.get("ignore_eos", False)
    if "stream_options" in values and not get("stream"):
        raise bad_value(
            "stream_options",
            "stream_options without stream: true; leave one out or add the other",
        )
    temperature = get("temperature", 1.0)
    return {
        "n": get("n", 1),
        # Drawn here, so that all that follows is a function of the request.
        "seed": secrets.randbits(63) if get("seed") is None else get("seed"),
        "temperature": 0.0 if temperature < LEAST_TEMPERATURE else temperature,
        "top_p": get("top_p", 1.0),
        "floor": floor_of(model, get("min_k"), get("quality")),
        "stop": get("stop", ()),
        "ignore_eos": ignore_eos,
        "grammar": grammar_of(values, ignore_eos) if {*FORMATS} & {*values} else None,
        "deadline_s": None if get("deadline_ms") is None else get("deadline_ms") / 1e3,
        "stream": get("stream", False),
        "include_usage": get("stream_options", {}).get("include_usage", False),
    }


def floor_of(model: ServedModel, min_k: int | None, quality: float | None) -> int:
    """The least K that meets both; what is None asks for nothing.

    `quality` counts as met from the smallest K on from which every measured one
    has ppl(own K) / ppl(K) of at least so much: a row may run at any K above its
    floor.

    Raises:
      ApiError: quality_unmeasured.
    """
    if min_k is None and quality is None:
        return model.default_floor
    if quality is None:
        return min_k
    ppl = model.perplexities or {}
    if model.own_k not in ppl:
        raise ApiError(
            "quality_unmeasured",
            f"quality needs the perplexity at K {model.own_k} in the checkpoint's "
            f"{REPORT_NAME}, which moe-edge refactor writes; give min_k instead",
            param="quality",
        )
    least = model.own_k
    for k in sorted((k for k in ppl if k < model.own_k), reverse=True):
        if ppl[model.own_k] < quality * ppl[k]:
            break
        least = k
    return max(least, min_k or 1)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) > MOST_STOPS:
        raise invalid(name, value, f"a string or a list of up to {MOST_STOPS}")
    for i, each in enumerate(given):
        if len(some_text(f"{name}[{i}]", each)) > MOST_STOP_LETTERS:
            expected = f"at most {MOST_STOP_LETTERS} characters, not {len(each)}"
            raise invalid(f"{name}[{i}]", each, expected)
    return tuple(dict.fromkeys(given))


def _stream_options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(name, value, "an object")
    # Obfuscation only pads chunks; there is none to switch off.
    return read_fields(
        value,
        {"include_usage": flag, "include_obfuscation": flag},
        within=f"{name}.",
    )
