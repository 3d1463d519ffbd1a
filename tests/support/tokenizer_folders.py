"""Six synthetic tokenizers whose special tokens stand in files next to tokenizer.json.

Byte-level BPE, SentencePiece's BPE and words; each file that may name a token, and each
way of naming one. `write_tokenizer(folder, name)` writes one of `NAMES`.
"""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ sep_token }}<|im_end|>{% endfor %}{{ eos_token }}|{{ pad_token }}|{{ unk_token"
    " }}|{{ cls_token }}|{{ mask_token }}|{{ image_token }}|{{ audio }}"
    "{{ '%s-%03d' % ('-' * 3, 7) }}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "<|im_start|> mill <|im_end|>?"},
]
TEXTS = [
    "",
    "ab cd",
    "ab<|im_end|>cd",
    " <|im_start|> ab\n<|im_end|> <tool>  cd</s>",
    "<s>AB <X> cd<sep><img>ab<cls>",
    "é<TOOL>東 [PAD]<|im_end",
]


def token(content: str, **flags) -> dict:
    """As tokenizer_config.json writes one."""
    off = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return off | {"content": content, "special": True} | flags


def byte_level(*whole: str) -> Tokenizer:
    """Every byte a token, then `whole`, which no merge makes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: id for id, text in enumerate([*alphabet, *whole])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁": 256, "a": 257, "b": 258, "▁a": 259, "ab": 260, "▁<|im_end|>": 261}
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def words() -> Tokenizer:
    """Words in lower case between a begin and an end token."""
    texts = "[UNK] <s> </s> ab cd be short mill ? . < > | im_start im_end s".split()
    vocab = {text: id for id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def _map_only():
    """special_tokens_map.json alone names what the vocabulary holds as plain tokens."""
    names = {
        "bos_token": token("<s>"),
        "eos_token": "</s>",
        "sep_token": token("<sep>", rstrip=True),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    texts = "<s> </s> <sep> <|im_start|> <|im_end|>".split()
    return byte_level(*texts), {}, names, None


def _decoder():
    """`added_tokens_decoder` numbers them; the older files then do not count."""
    config = {
        "added_tokens_decoder": {
            "258": token("<|im_end|>"),
            "257": token("<|im_start|>", rstrip=True),
            "259": token("<tool>", special=False, lstrip=True, normalized=True),
            "256": token("</s>", special=False),
        },
        "bos_token": None,
        "eos_token": token("</s>") | {"__type": "AddedToken"},
        "pad_token": "<|im_end|>",
        "extra_special_tokens": ["<|im_start|>", "<img>"],
    }
    older = {"bos_token": "<s>", "sep_token": "<sep>"}
    return byte_level(), config, older, {"<X>": 256}


def _added_only():
    """added_tokens.json numbers them, special_tokens_map.json names some of them."""
    numbered = {"<|im_start|>": 16, "<|im_end|>": 17, "<TOOL>": 18, "<X>": 19}
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "[UNK]"}
    config = {"extra_special_tokens": ["<|im_start|>"], "bos_token": "</s>"}
    return words(), config, names, numbered


def _split():
    """Special tokens in a text are letters, added ones that are not special stay."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    config = {
        "split_special_tokens": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    return tokenizer, config, None, None


def _named():
    """Every standard name, names of their own, and a mapping of extra tokens."""
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "[UNK]",
        "sep_token": "<sep>",
        "pad_token": "[PAD]",
        "cls_token": "<cls>",
        "mask_token": "<mask>",
        "image_token": "<img>",
        "extra_special_tokens": {"audio": "<|im_start|>"},
    }
    return words(), config, {"image_token": "<X>", "mask_token": None}, None


def _sentencepiece():
    """Flags matter: a normalized token is looked for after the space was put first."""
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "added_tokens_decoder": {
            "262": token("<s>"),
            "263": token("</s>"),
            "264": token("<|im_end|>", normalized=True),
            "265": token("<|im_start|>", lstrip=True),
        },
        "additional_special_tokens": ["<|im_end|>", "<tool>"],
    }
    return tokenizer, config, None, None


_KINDS = {
    "map": _map_only,
    "decoder": _decoder,
    "added": _added_only,
    "split": _split,
    "named": _named,
    "sentencepiece": _sentencepiece,
}
NAMES = tuple(_KINDS)


def write_tokenizer(folder: Path, name: str) -> Path:
    """Writes the files of a tokenizer; returns tokenizer.json."""
    tokenizer, config, special, added = _KINDS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    files = {
        "tokenizer_config": config,
        "special_tokens_map": special,
        "added_tokens": added,
    }
    for file, content in files.items():
        if content is not None:
            text = json.dumps(content, ensure_ascii=False)
            (folder / f"{file}.json").write_text(text, encoding="utf-8")
    return folder / "tokenizer.json"
