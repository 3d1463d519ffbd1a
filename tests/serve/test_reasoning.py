"""What a model thinks, told apart from what it says, however its text is cut."""

import numpy as np
import pytest

from moe_edge.serve.chat_body import read_chat
from moe_edge.serve.chat_template import ChatTemplate
from moe_edge.serve.errors import ApiError
from moe_edge.serve.grammar import Grammars, GrammarSpec
from moe_edge.serve.reading import Reading
from moe_edge.serve.reasoning import (
    KNOWN,
    Markers,
    Reasoning,
    Split,
    markers_of,
    reasoning_after,
)
from tests.support.family_templates import FAMILY_TEMPLATES
from tests.support.served import EOS, body_of, model_of, play
from tests.support.tiny_checkpoint import CONFIG

THINK = KNOWN[0]
CASES = [
    # (inside, text, thought, said)
    (True, "a b\n</think>\n\nYes.\n", "a b", "Yes.\n"),
    (True, "never ends </thin", "never ends </thin", ""),
    (True, "</think>Yes", "", "Yes"),
    (False, "<think>\n a <b> </think> Yes </think>", "a <b>", "Yes </think>"),
    (False, "\n<think></think>Yes", "", "Yes"),
    (False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    (False, "<thin air", "", "<thin air"),
    (False, "", "", ""),
]


@pytest.mark.parametrize("inside, text, thought, said", CASES)
def test_text_is_split_the_same_however_it_arrives(inside, text, thought, said):
    for size in (1, 2, 3, 7, 100):
        split = Split(Reasoning(THINK, inside))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [split.feed(piece) for piece in pieces] + [split.feed("", True)]
        assert "".join(each for each, _ in found) == thought
        assert "".join(each for _, each in found) == said


def test_what_cannot_be_a_marker_is_not_held_back():
    split = Split(Reasoning(THINK, True))
    assert split.feed("ab</") == ("ab", "")
    assert split.feed("b>c </th") == ("</b>c", "")
    assert split.feed("ink>d") == ("", "d")
    assert split.feed("</think>") == ("", "</think>")


def test_markers_come_from_the_template_and_the_prompt():
    thinking = {name: markers_of(source) for name, source in FAMILY_TEMPLATES.items()}
    assert thinking["glm4_moe"] == thinking["minimax_m2"] == THINK
    assert thinking["gemma4_text"] == Markers("<|channel>thought\n", "<channel|>")
    assert thinking["phimoe"] is None and thinking["llama4_text"] is None

    def inside(prompt):
        return reasoning_after(prompt, THINK).inside

    assert inside("a<think>\n") and inside("<think>b</think>c<think>")
    assert not inside("a") and not inside("<think></think>\n")
    assert reasoning_after("a", None) is None


OPENS = ChatTemplate(
    "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}</think>{% endif %}"
    "{% endif %}",
    "x",
)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_has_both_apart(model, tokenizer, stream):
    body = body_of(messages=[{"role": "user", "content": "a"}], stream=stream)
    request = read_chat(body, model)
    prompts = request.encode(model, OPENS)
    assert prompts[0].reading.reasoning == Reasoning(THINK, True)
    tokens = tokenizer.encode("so\n</think>\n\nYes 🦊.", begin=False, end=False)
    found = play(request, prompts, model, [*tokens, EOS], stream)
    if stream:
        deltas = [c["choices"][0]["delta"] for c in found if c and c["choices"]]
        thought, said = (
            "".join(delta.get(name, "") for delta in deltas)
            for name in ("reasoning_content", "content")
        )
        assert not any({"content", "reasoning_content"} <= set(d) for d in deltas[:-2])
    else:
        message = found["choices"][0]["message"]
        thought, said = message["reasoning_content"], message["content"]
    assert (thought, said) == ("so", "Yes 🦊.")


def test_effort_reaches_templates_that_know_it(model):
    messages = [{"role": "user", "content": "a", "reasoning_content": None}]
    request = read_chat(body_of(messages=messages, reasoning_effort="low"), model)
    (prompt,) = request.encode(model, OPENS)
    assert prompt.text.endswith("low</think>") and not prompt.reading.reasoning.inside
    with pytest.raises(ApiError, match="has no reasoning_effort; leave it out"):
        request.encode(model, ChatTemplate("{{ messages[0].content }}", "x"))
    with pytest.raises(ApiError, match="one of none, minimal, low"):
        read_chat(body_of(messages=messages, reasoning_effort="lots"), model)


def test_what_was_thought_before_goes_to_the_template(model):
    messages = [{"role": "assistant", "content": "b", "reasoning_content": "a"}]
    template = ChatTemplate("{{ messages[0].reasoning_content }}", "x")
    request = read_chat(body_of(messages=messages), model)
    assert request.encode(model, template)[0].text == "a"


def test_grammar_begins_when_the_thinking_is_over(tokenizer):
    V = CONFIG["vocab_size"]
    grammar = Grammars(tokenizer, V, (EOS,)).compile(GrammarSpec("regex", "7", "f"))
    guide = grammar.guide(Reasoning(THINK, True))
    bits_W, words = np.zeros(-(-V // 32), np.uint32), "hm </think>"
    for token in tokenizer.encode(words, begin=False, end=False):
        guide.fill(bits_W)
        bits = np.unpackbits(bits_W.view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits == 0).tolist() == [EOS]  # no end before the answer
        guide.accept(token)
    guide.fill(bits_W)
    (seven,) = tokenizer.encode("7", begin=False, end=False)
    bits = np.unpackbits(bits_W.view(np.uint8), bitorder="little")[:V]
    assert np.flatnonzero(bits).tolist() == [seven]


def test_special_markers_are_text_where_a_model_thinks(tokenizer, model):
    reading = Reading(Reasoning(Markers("<x>", "<|end|>"), True))
    assert reading.needs_special(tokenizer)
    assert not Reading(Reasoning(THINK, True)).needs_special(tokenizer)
    request = read_chat(
        body_of(messages=[{"role": "user", "content": "a"}], max_tokens=9),
        model_of(tokenizer, eos_ids=()),
    )
    (prompt,) = request.encode(model, OPENS)
    tokens = tokenizer.encode("so<|end|>Yes", begin=False, end=False)[:9]
    prompts = [prompt._replace(reading=reading)]
    asked = model_of(tokenizer, eos_ids=())
    message = play(request, prompts, asked, tokens, False)["choices"][0]["message"]
    assert message["reasoning_content"] == "so"
