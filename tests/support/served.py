"""A served model over the tiny tokenizer, and rows that a list of tokens plays."""

import json
from types import SimpleNamespace

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.model.new_token import NewToken, Score
from moe_edge.schedule.request import Request
from moe_edge.serve.call import Call
from moe_edge.serve.generation import make_answer
from moe_edge.serve.grammar import Grammars
from moe_edge.serve.served_model import ServedModel
from tests.support.tiny_checkpoint import CONFIG, tiny_tokenizer

EOS = 0  # <|end|>


def text_tokenizer(folder) -> Tokenizer:
    """The tiny byte-level tokenizer from a file."""
    path = folder / "tokenizer.json"
    tiny_tokenizer().save(str(path))
    return Tokenizer(path, SimpleNamespace(vocab_size=CONFIG["vocab_size"]))


def model_of(tokenizer, **changes) -> ServedModel:
    return ServedModel(
        **{
            "id": "tiny",
            "tokenizer": tokenizer,
            "vocab_size": CONFIG["vocab_size"],
            "grammars": Grammars(tokenizer, CONFIG["vocab_size"], (EOS,)),
            "own_k": 32,
            "default_floor": 32,
            "max_context": 128,
            "eos_ids": (EOS,),
            "perplexities": {8: 12.0, 16: 11.0, 24: 11.5, 32: 10.0},
        }
        | changes
    )


def body_of(**fields) -> bytes:
    return json.dumps(fields).encode()


def score_of(token: int, top: int) -> Score:
    """A token is as likely as its number says; 1 is likelier."""
    own = -0.1 * token - 0.3
    return Score(own, ((1, -0.25), (token, own))[:top])


def play(request, prompts, model, tokens, stream: bool):
    """The chunks or the body of a request whose every row gets these tokens."""
    call = Call(request, prompts, model, "/v1/completions", arrival_s=10.0)
    answer = make_answer(call, model)
    chunks = answer.start() if stream else []
    for index, row in enumerate(map(_begun, call.rows)):
        for i, token in enumerate(tokens, start=1):
            row.k = 8 * i
            row.add(10.5 + 0.25 * i)
            top = request.top_logprobs
            score = None if top is None else score_of(token, top)
            row.ended_by = row.ends(NewToken(0, token, score))
            if row.ended_by is None and not row.left:
                row.ended_by = "length"
            if stream and (chunk := answer.more(index)):
                chunks.append(chunk)
            if row.ended_by:
                break
        row.ended_by = row.ended_by or "deadline"
        if stream:
            chunks += answer.end(index)
    return [*chunks, answer.usage_chunk()] if stream else answer.body()


def _begun(row: Request) -> Request:
    row.arrival_s, row.admitted_s = 10.0, 10.25
    row.cached_tokens, row.moved_bytes = 1, 1000.0
    row.routed, row.substituted = 40, 10
    if row.score_prompt:
        row.prompt_scores += [
            score_of(token, row.top_logprobs) for token in row.prompt[1:]
        ]
    return row
