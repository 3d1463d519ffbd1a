"""Tokenizers in GGUF files: byte-level BPE and SentencePiece's, and refusals."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from moe_edge.convert.gguf_file import GgufFile
from moe_edge.convert.gguf_pretokenizers import KNOWN
from moe_edge.convert.gguf_tokenizer import tokenizer_files
from moe_edge.convert.open import DEFAULT_MODEL, open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import CheckpointError, ConfigError
from tests.support.conversion import convert
from tests.support.gguf_files import from_hf, tokenizer_metadata, write_gguf
from tests.support.tiny_checkpoint import TEXT, tiny_tokenizer
from tests.support.tiny_checkpoints import random_tensors, raw_config

HELD_OUT = DEFAULT_MODEL.parent / "evaluate" / "held_out"
ODD = "It's 1234 café cafe\u0301 ,.!?  \n\n\t x\r\n 東京 🦊 I'LL don't #tag Ω \u2126 ۳۴"


def built(path, said: dict) -> Tokenizer:
    files = tokenizer_files(GgufFile(write_gguf(path, said, {})))
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


def test_default_models_tokenizer_survives(tmp_path):
    original = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    got = built(tmp_path / "x.gguf", tokenizer_metadata(original, "starcoder"))
    texts = [path.read_text("utf-8") for path in sorted(HELD_OUT.glob("*.txt"))]
    assert texts
    for text in [*texts, ODD, "a<|endoftext|>b"]:
        ids = original.encode(text).ids
        assert got.encode(text).ids == ids
        assert got.decode(ids) == original.decode(ids)
    assert got.get_vocab() == original.get_vocab()


def test_tokenizer_goes_with_the_conversion(tmp_path):
    raw = raw_config("qwen2_moe", vocab_size=330, rope_theta=1e4)
    said, tensors = from_hf(raw | {"rms_norm_eps": 1e-6}, random_tensors(raw))
    original = tiny_tokenizer()
    filled = [*sorted(original.get_vocab(), key=original.get_vocab().get)]
    filled += [f"[PAD{i}]" for i in range(len(filled), 330)]
    types = [3 if t == "<|end|>" else 5 if t.startswith("[PAD") else 1 for t in filled]
    said |= tokenizer_metadata(
        original, "gpt-2", tokens=filled, token_type=np.array(types), eos_token_id=0
    )
    said |= {"tokenizer.ggml.padding_token_id": 0, "tokenizer.chat_template": "{{ x }}"}
    file = write_gguf(tmp_path / "x.gguf", said, tensors)
    convert(file, tmp_path / "ours")
    for path in (file, tmp_path / "ours"):
        reader = open_checkpoint(path)
        tokenizer = load_tokenizer(reader)
        assert reader.config.eos_ids == (0,)
        assert tokenizer.vocab_size == original.get_vocab_size()
        assert tokenizer.encode(TEXT + ODD) == original.encode(TEXT + ODD).ids
        config = json.loads((tokenizer.folder / "tokenizer_config.json").read_text())
        assert config["chat_template"] == "{{ x }}"
        assert (config["eos_token"], config["bos_token"]) == ("<|end|>", None)


def test_begin_of_text_is_added_as_the_file_or_its_kind_says(tmp_path):
    path, original = tmp_path / "x.gguf", tiny_tokenizer()
    plain = original.encode("The mill").ids
    for pre, more, adds in (
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ):
        got = built(path, tokenizer_metadata(original, pre, bos_token_id=0, **more))
        assert got.encode("The mill").ids == [0] * adds + plain


@pytest.mark.parametrize("pre, text, pieces", [
    ("gpt-2", "It's 123  x", "It|'s| 123| | x"),
    ("olmo", "cafe\u0301", "café"),
    ("starcoder", "a 12", "a| |1|2"),
    ("qwen2", "I'LL 123\n\n x", "I|'LL| |1|2|3|\n\n| x"),
    ("llama-bpe", "It's 12345", "It|'s| |123|45"),
    ("gpt-4o", "HelloWorld's 1234 /\n", "Hello|World's| |123|4| /\n"),
    ("llama4", "HelloWorld's 1234 /\n", "Hello|World's| |123|4| /\n"),
    ("minimax-m2", "I'LL 1234", "I'LL| |123|4"),
    ("glm4", "It's 12345", "It|'s| |123|45"),
    ("hunyuan", "I'LL cafe\u0301 12", "I|'LL| café| |1|2"),
    ("solar-open", "cafe\u0301 12", "cafe|\u0301| |1|2"),
    ("exaone-moe", "It's the mill 12.\n\nx", "It|'s| the mill| |1|2|.\n|\n|x"),
    ("kimi-k2", "Hi東京HelloWorld's 1234!", "Hi|東京|Hello|World's| |123|4|!"),
    ("deepseek-llm", "Hi 東京, 12\n\u2126", "Hi| |東京|,| |12|\n|\u2126"),
    ("deepseek-coder", "Hi 東京, 12", "Hi| |東京|,| |1|2"),
    ("deepseek-v3", "Hi東京 #tag 1234!", "Hi|東京| #|tag| |123|4|!"),
])  # fmt: skip
def test_text_is_cut_as_the_name_says(pre, text, pieces, tmp_path):
    tokenizer = built(tmp_path / "x.gguf", tokenizer_metadata(tiny_tokenizer(), pre))
    normal = tokenizer.normalizer
    text = normal.normalize_str(text) if normal else text
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces.split("|")


def test_every_known_rule_builds_and_loses_no_text(tmp_path):
    for pre in KNOWN:
        tokenizer = built(
            tmp_path / "x.gguf", tokenizer_metadata(tiny_tokenizer(), pre)
        )
        text = ODD.replace("e\u0301", "é").replace("\u2126", "Ω")
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_user_tokens_are_text_and_control_tokens_are_not(tmp_path):
    original = tiny_tokenizer()
    original.add_tokens(["  x  "])
    got = built(tmp_path / "x.gguf", tokenizer_metadata(original, "gpt-2"))
    ids = got.encode("a  x  <|end|>b").ids
    assert ids == original.encode("a  x  <|end|>b").ids
    assert got.decode(ids) == "a  x  b"


SPM = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
SPM += ["▁", "h", "e", "l", "o", "he", "ll", "hell", "▁hell", "▁hello", "lo", "hello"]


def spm(**more) -> dict:
    """A SentencePiece vocabulary: tokens later in the list have lower scores."""
    said = {
        "model": "llama",
        "tokens": SPM,
        "scores": np.array([0.0 - max(i - 263, 0) for i in range(len(SPM))]),
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * (len(SPM) - 259)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (said | more).items() if v is not None}


def test_sentencepiece_joins_the_best_score_first(tmp_path):
    got = built(tmp_path / "x.gguf", spm())
    assert got.encode("hello").tokens == ["<s>", "▁hello"]
    # "ll" (before "lo" in the list) is joined first, then "hell", so "lo" never is.
    assert got.encode("elo").tokens == ["<s>", "▁", "e", "lo"]
    assert got.encode("ello").tokens == ["<s>", "▁", "e", "ll", "o"]
    assert got.encode("hé").tokens == ["<s>", "▁", "h", "<0xC3>", "<0xA9>"]
    for text in ("hello hello", " é 東京 🦊\nhell"):
        assert got.decode(got.encode(text).ids) == text
    bare = built(tmp_path / "x.gguf", spm(add_space_prefix=False, add_bos_token=False))
    assert bare.encode("hello").tokens == ["hello"]


def test_gemma4_joins_characters_by_its_merges(tmp_path):
    merges = ["h e", "l l", "he ll", "▁ hell", "l o", "▁hell o", "\n \n"]
    tokens = [*SPM[:-1], "\n", "\n\n"]
    types = np.array([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    said = {"model": "gemma4", "merges": merges, "tokens": tokens, "token_type": types}
    got = built(tmp_path / "x.gguf", spm(**said, scores=None, add_space_prefix=False))
    assert got.encode("hell hello").tokens == ["<s>", "hell", "▁hello"]
    assert got.encode("elo\n\nhé").tokens[1:] == [
        *("e", "lo", "\n\n", "h", "<0xC3>", "<0xA9>")
    ]
    for text in ("hello hello", " é  東京 🦊\nhell"):
        assert got.decode(got.encode(text).ids) == text


REFUSED = [
    ({"model": "t5"}, "tokenizer of kind 't5'; known: gpt2, llama, gemma4; convert"),
    ({"pre": "mystery"}, "pre-tokenizer in .* 'mystery'; known: deepseek-coder"),
    ({"pre": ""}, "pre-tokenizer in .* ''; known"),
    ({"tokens": [1, 2]}, r"tokens is '\[1 2\]', expected"),
    ({"tokens": ["a"]}, "has 1 tokens and 320 token types"),
    ({"merges": ["a b c"]}, "merge 0 is 'a b c', expected two tokens"),
    ({"merges": ["nope x"]}, "cannot be built: .*nope"),
    ({"eos_token_id": 320}, "eos_token_id is 320, expected less than 320"),
    ({"bos_token_id": "x"}, "bos_token_id is 'x', expected"),
    ({"add_eos_token": True}, "add_eos_token is True, expected False"),
    ({"add_bos_token": 1}, "add_bos_token is '1', expected"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_byte_level_tokenizers_are_refused_by_name(change, message, tmp_path):
    with pytest.raises((CheckpointError, ConfigError), match=message):
        built(tmp_path / "x.gguf", tokenizer_metadata(tiny_tokenizer(), "gpt-2") | {
            f"tokenizer.ggml.{key}": value for key, value in change.items()
        })  # fmt: skip


def test_sentencepiece_without_scores_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has 0 scores for 271 tokens"):
        built(tmp_path / "x.gguf", spm(scores=None))


def test_sentencepiece_with_an_endless_token_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="token 260 has 1001 characters, expec"):
        built(tmp_path / "x.gguf", spm(tokens=[*SPM[:260], "h" * 1001, *SPM[261:]]))


def test_unknown_rule_is_refused_before_weights_are_read(tmp_path):
    raw = raw_config("olmoe", rms_norm_eps=1e-5)
    said, tensors = from_hf(raw, random_tensors(raw))
    said |= tokenizer_metadata(tiny_tokenizer(), "mystery")
    file = write_gguf(tmp_path / "x.gguf", said, tensors)
    with pytest.raises(ConfigError, match="'mystery'; known"):
        convert(file, tmp_path / "ours", dry_run=True)


def test_a_file_without_tokenizer_says_so(tmp_path):
    raw = raw_config("olmoe", rms_norm_eps=1e-5)
    file = write_gguf(tmp_path / "x.gguf", *from_hf(raw, random_tensors(raw)))
    with pytest.raises(
        CheckpointError, match="x.gguf has no tokenizer.json.* hf/ of what"
    ):
        load_tokenizer(open_checkpoint(file))
