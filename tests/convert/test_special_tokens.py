"""Special and added tokens of the files next to tokenizer.json; parity has the rest."""

import json
import types

import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.special_tokens import read_special_tokens
from moe_edge.convert.tokenizer import Tokenizer, load_tokenizer
from moe_edge.core.checks import CheckpointError
from tests.support.tiny_checkpoints import hf_folder
from tests.support.tokenizer_folders import write_tokenizer


def open_tokenizer(folder, name, vocab_size=320):
    path = write_tokenizer(folder, name)
    return Tokenizer(path, types.SimpleNamespace(vocab_size=vocab_size))


@pytest.mark.parametrize(
    ("name", "text", "ids", "shown"),
    [
        ("map", "<s><sep>  <|im_end|></s>", [256, 258, 260, 257], ""),
        ("decoder", "<|im_start|> <|im_end|><img>", [257, 258, 260], ""),
        ("decoder", "  <tool></s>", [259, 256], "<tool>"),
        ("added", "<|im_start|><TOOL><X>", [1, 16, 18, 19, 2], "<tool> <x> </s>"),
        ("named", "<img><sep>ab[PAD]", [1, 19, 16, 3, 17, 2], "ab"),
    ],
)
def test_encode_knows_tokens_of_every_file(tmp_path, name, text, ids, shown):
    tokenizer = open_tokenizer(tmp_path, name)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == shown
    one = tokenizer.encode_batch([text], begin=False, end=False)[0][0]
    assert tokenizer.token_bytes(one) == tokenizer.token(one).encode()


def test_split_special_tokens_are_letters(tmp_path):
    tokenizer = open_tokenizer(tmp_path, "split")
    assert len(tokenizer.encode("<s><|im_end|>")) == len("<s><|im_end|>")
    assert tokenizer.encode("<tool>") == [258]  # it is not special


def test_read_special_tokens_names(tmp_path):
    write_tokenizer(tmp_path / "named", "named")
    found = read_special_tokens(tmp_path / "named")
    assert found.names == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "[UNK]",
        "sep_token": "<sep>",
        "pad_token": "[PAD]",
        "cls_token": "<cls>",
        "image_token": "<img>",
        "audio": "<|im_start|>",
    }
    # With numbered tokens in the config the older files do not count.
    write_tokenizer(tmp_path / "decoder", "decoder")
    found = read_special_tokens(tmp_path / "decoder")
    assert found.names == {"eos_token": "</s>", "pad_token": "<|im_end|>"}
    assert read_special_tokens(None).names == {}


def test_converted_checkpoint_keeps_the_files(tmp_path):
    folder = hf_folder(tmp_path / "hf", "olmoe", vocab_size=320)
    write_tokenizer(folder, "added")
    convert_checkpoint(folder, tmp_path / "ours", progress=False)
    tokenizer = load_tokenizer(open_checkpoint(tmp_path / "ours"))
    assert tokenizer.encode("<|im_start|>ab") == [1, 16, 3, 2]
    assert read_special_tokens(tokenizer.folder).names["eos_token"] == "<|im_end|>"


def test_tokens_beyond_the_vocabulary_of_the_model_are_named(tmp_path):
    message = r"21 tokens .* of 18: .*, which add <sep>, \[PAD\], <cls>, .*; take them"
    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(tmp_path, "named", 18)


CONFIG, MAP, ADDED = "tokenizer_config", "special_tokens_map", "added_tokens"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (CONFIG, {"bos_token": 5}, "json: bos_token is 5, expected a token such as"),
        (CONFIG, {"x_token": {"lstrip": True}}, "json: x_token is {'lstrip': True}"),
        (
            CONFIG,
            {"eos_token": {"content": "a", "rstrip": 1}},
            "eos_token: rstrip is 1, expected true or false",
        ),
        (CONFIG, {"extra_special_tokens": "a"}, "tokens is 'a', expected a list"),
        (CONFIG, {"additional_special_tokens": [7]}, "special_tokens is 7, expected"),
        (CONFIG, {"split_special_tokens": "no"}, "split_special_tokens is 'no'"),
        (CONFIG, {"added_tokens_decoder": []}, r"decoder is \[\], expected an object"),
        (CONFIG, {"added_tokens_decoder": {"a": "b"}}, "decoder is 'a', expected a wh"),
        (
            CONFIG,
            {"added_tokens_decoder": {"9": "<z>"}},
            "config.json says that token '<z>' is 9, with tokenizer.json it is 16",
        ),
        (MAP, [], r"tokens_map.json is \[\], expected an object; copy the"),
        (MAP, {"sep_token": []}, r"map.json: sep_token is \[\], expected a token"),
        (ADDED, {"ab": 4}, "added_tokens.json says that token 'ab' is 4, .* it is 3"),
        (ADDED, {"ab": None}, "added_tokens.json is None, expected a whole number"),
    ],
)
def test_files_that_cannot_be_right_are_refused(tmp_path, file, content, message):
    path = write_tokenizer(tmp_path, "added")
    for name in (CONFIG, MAP, ADDED):
        (tmp_path / f"{name}.json").unlink()
    (tmp_path / f"{file}.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(path, types.SimpleNamespace(vocab_size=320))
