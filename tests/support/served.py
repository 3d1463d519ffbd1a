"""A served model over the tiny tokenizer, and rows that a list of tokens plays."""

import json
from types import SimpleNamespace

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.model.new_token import NewToken, Score
from moe_edge.schedule.figures import Served
from moe_edge.serve.choices import make_choices
from moe_edge.serve.driver import Live
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
    choices = make_choices(request, prompts, model, arrival_s=10.0)
    answer = make_answer(request, choices, model)
    chunks = answer.start() if stream else []
    for choice in choices:
        live = _live(choice)
        for i, token in enumerate(tokens, start=1):
            live.served.add(10.5 + 0.25 * i, 8 * i)
            top = request.top_logprobs
            score = None if top is None else score_of(token, top)
            live.ended_by = choice.ends(NewToken(0, token, score))
            if live.ended_by is None and i == choice.asked.max_new_tokens:
                live.ended_by = "length"
            if stream and (chunk := answer.more(choice)):
                chunks.append(chunk)
            if live.ended_by:
                break
        live.ended_by = live.ended_by or "deadline"
        if stream:
            chunks += answer.end(choice)
    return [*chunks, answer.usage_chunk()] if stream else answer.body()


def _live(choice) -> Live:
    asked = choice.asked
    choice.live = Live(asked, None, Served(10.0, asked.floor, admitted_s=10.25))
    choice.live.cached_tokens = 1
    choice.live.moved_bytes, choice.live.routed = 1000.0, 40
    choice.live.substituted = 10
    if asked.score_prompt:
        choice.live.prompt_scores = [
            score_of(token, asked.top_logprobs) for token in asked.prompt[1:]
        ]
    return choice.live
