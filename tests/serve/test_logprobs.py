"""Names of tokens, and log probabilities in both shapes."""

import math

from moe_edge.model.new_token import Score
from moe_edge.serve.logprobs import (
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_tokens,
)
from moe_edge.serve.text_ends import TokenAt
from tests.support.served import EOS


def test_names_of_all_tokens_differ_and_have_their_bytes(tokenizer):
    names = TokenNames(tokenizer)
    every = [names[id] for id in range(320)]
    assert len(set(every)) == 320 and not any("\ufffd" in name for name in every)
    assert names[tokenizer.encode("🦊")[-1]] == r"bytes:\xa6\x8a"
    assert names[EOS] == "<|end|>"


def test_names_of_the_same_text_are_told_apart():
    class Same:
        def token_bytes(self, id):
            return b"a" if id < 3 else b""

    keys = TokenNames(Same()).keys_of(2, [1, 2, 3, 4])
    assert keys == {2: "a", 1: "token_id:1", 3: "", 4: "token_id:4"}


def test_completion_logprobs_have_each_tokens_own_value(tokenizer):
    names = TokenNames(tokenizer)
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    tokens = [
        TokenAt(a, None, 0),
        TokenAt(b, Score(-2.5, ((c, -0.5), (a, -1.0))), 1),
        TokenAt(c, Score(-0.1, ((c, -0.1), (a, -3.0))), 2),
        TokenAt(c, Score(-math.inf, ()), 3),
    ]
    assert completion_logprobs(tokens, names) == {
        "tokens": ["a", "b", "c", "c"],
        "token_logprobs": [None, -2.5, -0.1, -9999.0],
        "top_logprobs": [
            None,
            {"c": -0.5, "a": -1.0, "b": -2.5},
            {"c": -0.1, "a": -3.0},
            {"c": -9999.0},
        ],
        "text_offset": [0, 1, 2, 3],
    }


def test_chat_logprobs_have_bytes_and_as_many_as_asked(tokenizer):
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    tokens = [TokenAt(b, Score(-2.5, ((a, -0.5),)), 0)]
    (entry,) = chat_logprobs(tokens, TokenNames(tokenizer))["content"]
    assert entry == {
        "token": "b",
        "logprob": -2.5,
        "bytes": [98],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }


def test_prompt_tokens_count_special_ones_too(tokenizer):
    ids = [*tokenizer.encode("mill"), EOS, *tokenizer.encode(" 🦊.")]
    scores = [Score(-float(id), ()) for id in ids[1:]]
    text = tokenizer.decode(ids, special=True)
    tokens = prompt_tokens(ids, scores, tokenizer, text)
    assert [each.token for each in tokens] == ids
    assert tokens[0].score is None and tokens[1].score.logprob == -float(ids[1])
    few = prompt_tokens(ids, scores[:1], tokenizer, text)
    assert [each.token for each in few] == ids and few[2].score is None
    offsets = {each.token: each.offset for each in tokens}
    assert text[offsets[EOS] :].startswith("<|end|>") and text[tokens[-1].offset] == "."


def test_prompt_tokens_that_the_tokenizer_added_take_no_room(tokenizer):
    mill = tokenizer.encode("mill")
    tokens = prompt_tokens([EOS, *mill], [], tokenizer, "mill")
    assert [each.offset for each in tokens[:2]] == [0, 0]
    shown = prompt_tokens([EOS, *mill], [], tokenizer, "<|end|>mill")
    assert [each.offset for each in shown[:2]] == [0, len("<|end|>")]
