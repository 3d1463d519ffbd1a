"""Six synthetic tokenizers: ids, texts and rendered prompts as `transformers` has them,
also of a checkpoint of ours made from them."""

import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.serve.chat_template import find_template
from tests.support.tiny_checkpoints import hf_folder
from tests.support.tokenizer_folders import NAMES, TALK, TEXTS, write_tokenizer

pytestmark = pytest.mark.parity


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
