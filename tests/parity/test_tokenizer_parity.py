"""Six synthetic tokenizers: ids, texts and rendered prompts as `transformers` has them,
also of a checkpoint of ours made from them."""

import json
from random import Random
from types import SimpleNamespace

import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.special_tokens import CONFIG, read_special_tokens
from moe_edge.convert.tokenizer import Tokenizer, load_tokenizer
from moe_edge.serve.chat_template import find_template
from tests.support.tiny_checkpoints import hf_folder
from tests.support.tokenizer_folders import (
    NAMES,
    TALK,
    TEXTS,
    byte_level,
    sentencepiece,
    token,
    words,
    write_tokenizer,
)

pytestmark = pytest.mark.parity
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_equals_transformers(tmp_path, name):
    from transformers import AutoTokenizer

    folder, ours = (
        hf_folder(tmp_path / "hf", "olmoe", vocab_size=320),
        tmp_path / "ours",
    )
    write_tokenizer(folder, name)
    convert_checkpoint(folder, ours, progress=False)
    want = AutoTokenizer.from_pretrained(folder)
    for checkpoint in (folder, ours):
        tokenizer = load_tokenizer(open_checkpoint(checkpoint))
        assert tokenizer.vocab_size == len(want)
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert ids == want(text)["input_ids"], text
            (plain,) = tokenizer.encode_batch([text], begin=False, end=False)
            assert plain == want(text, add_special_tokens=False)["input_ids"], text
            assert tokenizer.decode(ids) == want.decode(ids, skip_special_tokens=True)
            assert tokenizer.decode(ids, special=True) == want.decode(ids)
        template = find_template(tokenizer.folder)
        for prompt in (True, False):
            text = template.render(TALK, add_generation_prompt=prompt)
            options = {"add_generation_prompt": prompt, "tokenize": False}
            assert text == want.apply_chat_template(TALK, **options)
            (ids,) = tokenizer.encode_batch([text], begin=False, end=False)
            options["tokenize"] = True
            assert ids == want.apply_chat_template(TALK, **options)["input_ids"]


PIECES = ["<s>", "</s>", "<a>", "<b>", "<|im_end|>", "ab", "[PAD]", "<T> x"]


def random_token(random, kind):
    """A token as one of the files writes it, now and then as its text alone."""
    text = random.choice(PIECES)
    if random.random() < 0.5:
        return text
    flags = {name: random.random() < 0.2 for name in ("lstrip", "rstrip", "normalized")}
    if kind == "map":
        return {n: v for n, v in token(text, **flags).items() if n != "special"}
    return token(text, special=random.random() < 0.8, **flags) | kind


def random_names(random, kind):
    names = "bos eos unk sep pad cls mask image other".split()
    found = {f"{name}_token": random_token(random, kind) for name in names}
    return {name: value for name, value in found.items() if random.random() < 0.3}


def random_files(random, vocab):
    """Files that agree about ids: those of the vocabulary, or the next ones."""

    def ids():
        new = iter(range(len(vocab), 2 * len(vocab)))
        picked = random.sample(PIECES, 3)
        return {t: vocab[t] if t in vocab else next(new) for t in picked}

    marked = {"__type": "AddedToken"}
    config = random_names(random, marked)
    older = random_names(random, "map")
    lists = [random_token(random, marked) for _ in range(random.randrange(3))]
    by_name = {"audio": random.choice(PIECES), "x_token": random.choice(PIECES)}
    if random.random() < 0.3:
        config["additional_special_tokens"] = lists
    if random.random() < 0.3:
        config["extra_special_tokens"] = random.choice([lists, by_name])
    if random.random() < 0.3:
        config["split_special_tokens"] = True
    if random.random() < 0.3:
        older["additional_special_tokens"] = random.sample(PIECES, 2)
    if random.random() < 0.3:
        texts = random.sample(PIECES, 2)
        older["extra_special_tokens"] = random.choice([texts, by_name])
    if random.random() < 0.4:
        config["added_tokens_decoder"] = {
            str(id): token(text, special=random.random() < 0.7, normalized=id % 2 == 0)
            for text, id in ids().items()
        }
    return {CONFIG: config, MAP: older, ADDED: ids()}


@pytest.mark.parametrize("seed", range(60))
def test_merged_files_equal_transformers(tmp_path, seed):
    from transformers import PreTrainedTokenizerFast

    random = Random(seed)
    base = random.choice([byte_level, words, sentencepiece])()
    base.add_special_tokens(["<s>", "</s>"][: random.randrange(3)])
    base.add_tokens(["<a>"][: random.randrange(2)])
    base.save(str(tmp_path / "tokenizer.json"))
    for name, content in random_files(random, base.get_vocab()).items():
        if random.random() < 0.7:
            (tmp_path / name).write_text(json.dumps(content))
    want = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path / "tokenizer.json", SimpleNamespace(vocab_size=999))
    assert read_special_tokens(tmp_path).names == want.special_tokens_map
    assert ours.vocab_size == len(want)
    for _ in range(5):
        text = "".join(random.choice([*PIECES, " ", "ab "]) for _ in range(8))
        ids = ours.encode(text)
        assert ids == want(text)["input_ids"], text
        assert ours.decode(ids) == want.decode(ids, skip_special_tokens=True)
