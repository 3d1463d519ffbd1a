import random

import pytest

from moe_edge.convert.text_stream import TextStream
from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.engine.prompts import Prompt, encode_prompts, read_prompts
from moe_edge.engine.run_generate import collect_prompts
from tests.support.table_engine import LetterTokenizer
from tests.support.tiny_checkpoint import TEXT, tiny_tokenizer


class PlainDecoder:
    """What `TextStream` needs of a tokenizer, over the `tokenizers` library."""

    def __init__(self):
        self.inner = tiny_tokenizer()

    def encode(self, text):
        return self.inner.encode(text).ids

    def decode(self, ids):
        return self.inner.decode(list(ids))


class SpaceDroppingDecoder:
    """Like Llama's: a word each, the first space of a text is dropped."""

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


def stream_all(tokenizer, ids, context=()):
    stream = TextStream(tokenizer, context)
    return [stream.push(token) for token in ids] + [stream.finish()]


@pytest.mark.parametrize("text", [TEXT, "🦊🦊", "naïve 東京", "a", "日本語のテキスト"])
def test_text_stream_pieces_join_to_the_text(text):
    tokenizer = PlainDecoder()
    pieces = stream_all(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_stream_random_tokens_equal_decode_at_once():
    tokenizer, rng = PlainDecoder(), random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(1, 320) for _ in range(12)]
        assert "".join(stream_all(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_stream_of_bytes_without_end_is_linear_and_exact():
    tokenizer, rng = PlainDecoder(), random.Random(0)
    decoded = []

    class Counted:
        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    torn = [id for id in range(320) if tokenizer.decode([id]) == "\ufffd"]
    for ids in ([rng.choice(torn) for _ in range(800)], [0] * 800):
        decoded.clear()
        assert "".join(stream_all(Counted(), ids)) == tokenizer.decode(ids)
        assert sum(decoded) < 40 * len(ids)  # 320 thousand if all were kept


def test_text_stream_after_context_keeps_the_space():
    assert "".join(stream_all(SpaceDroppingDecoder(), [3, 4], [1, 2])) == " w3 w4"
    assert "".join(stream_all(SpaceDroppingDecoder(), [3, 4])) == "w3 w4"


def test_read_prompts_ignores_facts_of_data_sets_and_blank_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    facts = '"task": "t", "answer": "y", "meta": {"year": 1}, "server": 0'
    path.write_text(f'{{"id": "a", "prompt": "x", {facts}}}\n\n')
    assert read_prompts(path) == [Prompt("a", "x")]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "p.jsonl:2 is not valid JSON: Expecting property name .* at column 2"),
        ("[1]", "p.jsonl:2 is a JSON list, expected an object"),
        ('{"id": "b"}', "p.jsonl:2: 'prompt' is None, expected a string"),
        ('{"id": 3, "prompt": "x"}', "p.jsonl:2: 'id' is 3, expected a string"),
        ('{"id": "b", "prompt": ""}', "p.jsonl:2: the prompt is empty"),
        ('{"id": "a", "prompt": "x"}', "p.jsonl:2: id 'a' occurs twice"),
        (
            '{"id": "b", "prompt": "x", "temprature": 1}',
            "p.jsonl:2: unknown key 'temprature'; known: id, prompt, server, task, ans",
        ),
    ],
)
def test_read_prompts_rejects_bad_line(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n' + line)
    with pytest.raises(RequestError, match=message):
        read_prompts(path)


def test_read_prompts_rejects_a_key_twice(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "prompt": "x", "prompt": "y"}')
    with pytest.raises(RequestError, match="p.jsonl:1.*'prompt' occurs twice"):
        read_prompts(path)


def test_read_prompts_rejects_bytes_that_are_no_utf8(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\n{"id": "a", "prompt": "\xe9t\xe9"}')  # Latin-1
    message = "p.jsonl:2 is not UTF-8 text: byte 24 is 0xe9; save it as UTF-8"
    with pytest.raises(RequestError, match=message):
        read_prompts(path)


def test_read_prompts_rejects_file_without_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(RequestError, match="p.jsonl holds no prompts"):
        read_prompts(path)


def test_encode_prompts_rejects_prompt_beyond_context():
    prompts = [Prompt("short", "ab"), Prompt("long", "abcdef")]
    with pytest.raises(CapacityError, match="'long' has 6 tokens; .*=4 .* of 8"):
        encode_prompts(LetterTokenizer(), prompts, 4, 8)
    with pytest.raises(CapacityError, match=r"context of 8 \(why\); shorten the"):
        encode_prompts(LetterTokenizer(), prompts, 4, 8, "why")


def test_encode_prompts_rejects_prompt_without_tokens():
    with pytest.raises(RequestError, match="prompt 'p' is empty"):
        encode_prompts(LetterTokenizer(), [Prompt("p", "")], 4, 8)


def test_prompt_that_is_not_utf8_is_refused():
    shown = b"caf\xe9".decode("utf-8", "surrogateescape")  # as the shell hands it over
    with pytest.raises(RequestError, match="number 0 is not UTF-8 .* character 3"):
        collect_prompts([shown], None)


def test_prompt_file_with_half_a_character_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "prompt": "whole \\ud83d\\ude00"}\n')
    assert read_prompts(path)[0].text == "whole \U0001f600"
    path.write_text('{"id": "a", "prompt": "half \\uD83D"}\n')
    with pytest.raises(RequestError, match="p.jsonl:1 .* half a character, .ud83d"):
        read_prompts(path)
