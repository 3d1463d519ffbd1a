"""Log probabilities through the server are those of launch/evaluate.py (gate B)."""

import numpy as np
import pytest

from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.likelihood import token_log_probs
from tests.support.live_server import checkpoint, live_server, read_reply
from tests.support.tiny_checkpoint import TEXT


@pytest.fixture(scope="module")
def server():
    with live_server() as running:
        yield running


@pytest.fixture(scope="module")
def engine():
    return load_engine(checkpoint(), with_tokenizer=False).engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [TEXT[:130], TEXT[-150:]])
def test_echoed_scores_are_those_of_evaluate(server, engine, stream, text):
    """Of prompts of several chunks of 32 tokens, the last of which is not whole."""
    ids = server.model.tokenizer.encode(text)
    assert len(ids) > 32 and len(ids) % 32
    asked = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 6}
    reply = server.complete(**asked, ignore_eos=True, stream=stream)
    if stream:
        parts = [event["choices"] for event in reply.events[:-1]]
        found = [part["logprobs"] for (part,) in parts]
        got = [value for each in found for value in each["token_logprobs"]]
        top = [value for each in found for value in each["top_logprobs"]]
    else:
        (choice,) = reply.json["choices"]
        found = choice["logprobs"]
        got, top = found["token_logprobs"], found["top_logprobs"]
    assert len(got) == len(top) == len(ids) + 6 and got[0] is top[0] is None
    # The new tokens are greedy: what evaluate makes of them, too.
    whole = ids + generate(engine, [ids], 6).tokens[0]
    want = np.asarray(token_log_probs(engine, [whole]))[0, 1 : len(whole)]
    np.testing.assert_allclose(got[1:], want, atol=1e-5)
    for own, likely in zip(got[1:], top[1:], strict=True):
        assert own in likely.values()  # to the bit


@pytest.mark.parametrize("count", [2, 97, 128])
def test_echoed_scores_of_a_prompt_alone_up_to_the_full_context(server, engine, count):
    """Next to rows that decode, so that the batch has steps while it rests."""
    ids = server.model.tokenizer.encode(TEXT * 3)[:count]
    others = [server.send_completion(max_tokens=40, ignore_eos=True) for _ in range(3)]
    asked = {"prompt": ids, "echo": True, "max_tokens": 0}
    (choice,) = server.complete(**asked, logprobs=1).json["choices"]
    got = choice["logprobs"]["token_logprobs"]
    want = np.asarray(token_log_probs(engine, [ids]))[0, 1:count]
    assert len(got) == count and got[0] is None
    np.testing.assert_allclose(got[1:], want, atol=1e-5)
    plain = server.complete(**asked)
    assert plain.json["choices"][0]["text"] == choice["text"]
    assert plain.json["usage"]["completion_tokens"] == 0
    assert {read_reply(sock).status for sock in others} == {200}


def test_prompt_of_one_token_more_than_the_context_is_refused(server):
    reply = server.complete(prompt=[5] * 129, echo=True, max_tokens=0)
    assert reply.status == 400
    message = "129 tokens, which with 0 new ones exceed the context of 128"
    assert message in reply.json["error"]["message"]
