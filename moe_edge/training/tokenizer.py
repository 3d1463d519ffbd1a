"""The default model's tokenizer: byte-level BPE in Hugging Face's tokenizer.json.

Digits are single tokens, which arithmetic needs. `<|endoftext|>` is id 0, separates
documents and ends generation; there is no BOS.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moe_edge.core.files import write_text

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges from `texts` until there are `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    special = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    for name, value in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
    ):
        write_text(folder / name, json.dumps(value, indent=2) + "\n")
