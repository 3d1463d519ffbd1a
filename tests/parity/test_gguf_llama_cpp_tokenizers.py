"""Tokens of llama.cpp on the same GGUF files (package `llama_cpp`)."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from moe_edge.convert.gguf_file import GgufFile
from moe_edge.convert.gguf_pretokenizers import KNOWN
from moe_edge.convert.gguf_tokenizer import tokenizer_files
from moe_edge.convert.open import DEFAULT_MODEL
from tests.convert.test_gguf_tokenizer import ODD, SPM, spm
from tests.support.gguf_files import from_hf, tokenizer_metadata, write_gguf
from tests.support.tiny_checkpoint import TEXT
from tests.support.tiny_checkpoints import random_tensors, raw_config

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.parity
# Composed: llama.cpp has no normaliser.
TEXTS = [
    ODD.replace("e\u0301", "é").replace("\u2126", "Ω"),
    TEXT,
    "HelloWorld's  12345 /\n\n x\n",
    "I'LL go\t\tto  the\n \n market, won't you?!\r\n",
    "def f(x):\n    return x+1 # 3.14\n",
    "東京 12 Hi한국어 café",
]
GEMMA4 = {
    "model": "gemma4",
    "scores": np.zeros(len(SPM) + 1),
    "add_space_prefix": False,
    "merges": ["h e", "l l", "he ll", "▁ hell", "l o", "▁hell o", "\n \n"],
    "tokens": [*SPM[:-1], "\n", "\n\n"],
    "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * (len(SPM) - 258)),
}


@pytest.mark.parametrize("pre", [*KNOWN, "gemma4"])
def test_tokens_are_those_of_llama_cpp(pre, tmp_path):
    if pre == "gemma4":
        said = spm(**GEMMA4)
    else:
        tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
        said = tokenizer_metadata(tokenizer, pre, bos_token_id=0, eos_token_id=0)
    raw = raw_config("olmoe", rms_norm_eps=1e-5)
    model, tensors = from_hf(raw, random_tensors(raw))
    model["olmoe.vocab_size"] = len(said["tokenizer.ggml.tokens"])
    path = write_gguf(tmp_path / "x.gguf", model | said, tensors)
    content = tokenizer_files(GgufFile(path))["tokenizer.json"]
    ours = Tokenizer.from_str(json.dumps(content))
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in TEXTS:
        expected = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text, add_special_tokens=False).ids == expected
