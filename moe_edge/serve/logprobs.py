"""Log probabilities of tokens in the two shapes of OpenAI's API."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from moe_edge.convert.text_stream import TextStream
from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.model.new_token import Score
from moe_edge.serve.text_ends import TokenAt

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not


class TokenNames:
    """How tokens are written: their text, or their bytes if these are no whole UTF-8.

    Names are made once each.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def bytes(self, id: int) -> bytes:
        """What the token adds to a text."""
        return self._tokenizer.token_bytes(id)

    def __getitem__(self, id: int) -> str:
        name = self._known.get(id)
        if name is None:
            raw = self.bytes(id)
            try:
                name = raw.decode("utf-8")
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._known[id] = name
        return name

    def keys_of(self, token: int, others: Iterable[int]) -> dict[int, str]:
        """Names of some tokens, all different: where two are one, by the id.

        `token` keeps its own name.
        """
        names = {token: self[token]}
        taken = {names[token]}
        for id in others:
            if id not in names:
                name = self[id] if self[id] not in taken else f"token_id:{id}"
                names[id] = name
                taken.add(name)
        return names


def completion_logprobs(
    tokens: Sequence[TokenAt], names: TokenNames
) -> dict[str, list]:
    """`logprobs` of a choice of a completion."""
    return {
        "tokens": [names[each.token] for each in tokens],
        "token_logprobs": [
            None if each.score is None else _finite(each.score.logprob)
            for each in tokens
        ],
        "top_logprobs": [
            None if each.score is None else _top(each.token, each.score, names)
            for each in tokens
        ],
        "text_offset": [each.offset for each in tokens],
    }


def _top(token: int, score: Score, names: TokenNames) -> dict[str, float]:
    """The likeliest tokens, and the token itself if it is none of them."""
    values = dict(score.top)
    values[token] = score.logprob
    keys = names.keys_of(token, values)
    return {keys[id]: _finite(value) for id, value in values.items()}


def chat_logprobs(tokens: Sequence[TokenAt], names: TokenNames) -> dict[str, Any]:
    """`logprobs` of a choice of a chat: the likeliest tokens are as many as asked."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names[id],
            "logprob": _finite(logprob),
            "bytes": list(names.bytes(id)),
        }

    content = []
    for each in tokens:
        own = each.score.logprob
        top = [(id, own if id == each.token else v) for id, v in each.score.top]
        content.append(
            entry(each.token, own) | {"top_logprobs": [entry(*pair) for pair in top]}
        )
    return {"content": content, "refusal": None}


def prompt_tokens(
    ids: Sequence[int], scores: Sequence[Score], tokenizer: Tokenizer, text: str
) -> tuple[TokenAt, ...]:
    """Tokens of a prompt that is shown; nothing comes before the first one.

    Args:
      scores: of the tokens from the second on; fewer, if a deadline came first.
      text: what is shown; without those special tokens that the tokenizer put there.
    """
    special = _WithSpecial(tokenizer)
    stream = TextStream(special if special.decode(ids) == text else tokenizer)
    length, tokens = 0, []
    for id, score in itertools.zip_longest(ids, [None, *scores]):
        tokens.append(TokenAt(id, score, length + stream.held))
        length += len(stream.push(id))
    return tuple(tokens)


class _WithSpecial:
    """A tokenizer whose text has its special tokens: a prompt is shown as it came."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, special=True)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
