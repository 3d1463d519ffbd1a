"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json and its config.

Three kinds of model are read: `gpt2`, byte-level BPE with its merges; `llama`,
SentencePiece's BPE, whose merges follow from the scores of its tokens; and `gemma4`,
BPE on characters with its merges. A rule that is not known is refused: another cut of
the text gives other tokens, silently.
"""

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from moe_edge.checkpoint.manifest import TOKENIZER_NAME
from moe_edge.convert.gguf_file import GgufFile
from moe_edge.convert.gguf_pretokenizers import KNOWN, byte_level, pre_tokenizer
from moe_edge.core.checks import CheckpointError, ConfigError, check_known

_PREFIX = "tokenizer.ggml."
_MODELS = ("gpt2", "llama", "gemma4")
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_MAX_PIECE = 1000
_SPACE = "\u2581"  # SentencePiece's
_ADVICE = "convert the model from its Hugging Face folder instead"


_KINDS = {
    list: "texts",
    np.ndarray: "numbers",
    bool: "true or false",
    int: "an integer",
}


def _get(file: GgufFile, key: str, kind: type, default: Any) -> Any:
    """A value of one of _KINDS, or the default where there is none."""
    value = file.metadata.get(_PREFIX + key, default)
    if value is not default and (
        not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)
    ):
        raise CheckpointError(
            f"{file.path}: {_PREFIX}{key} is {str(value)[:60]!r}, expected "
            f"{_KINDS[kind]}; copy it again"
        )
    return value


def check_tokenizer(file: GgufFile) -> None:
    """Refuses a kind of tokenizer that is not read, before any work is done."""
    model = str(file.metadata.get(_PREFIX + "model", "none"))
    if model in ("none", "no_vocab"):
        return
    if model not in _MODELS:
        raise ConfigError(
            f"{file.path} has a tokenizer of kind {model[:60]!r}; known: "
            f"{', '.join(_MODELS)}; {_ADVICE}"
        )
    if model == "gpt2":
        pre = file.metadata.get(_PREFIX + "pre", "")
        check_known(f"pre-tokenizer in {file.path}", str(pre)[:60], KNOWN)


def tokenizer_files(file: GgufFile) -> dict[str, Any]:
    """File name -> content of the small files; {} if there is no tokenizer.

    Raises:
      CheckpointError: parts are missing, or do not fit together.
    """
    check_tokenizer(file)
    model = str(file.metadata.get(_PREFIX + "model", "none"))
    if model not in _MODELS:
        return {}
    tokens = _get(file, "tokens", list, [])
    types = _get(file, "token_type", np.ndarray, np.full(len(tokens), _NORMAL)).tolist()
    if not tokens or len(types) != len(tokens) or type(tokens[0]) is not str:
        raise CheckpointError(
            f"{file.path} has {len(tokens)} tokens and {len(types)} token types, "
            "expected as many, and some; copy it again"
        )
    # Converters fill the vocabulary up to the embedding's rows.
    vocab = {
        token: id
        for id, token in enumerate(tokens)
        if types[id] != _UNUSED or token != f"[PAD{id}]"
    }
    parts = {"gpt2": _gpt2, "llama": _llama, "gemma4": _gemma4}[model]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": types[id] != _USER,
            }
            for id, token in enumerate(tokens)
            if types[id] in (_CONTROL, _USER, _UNKNOWN) and vocab.get(token) == id
        ],
    } | parts(file, tokens, types, vocab)
    special = {
        name: _special(file, key, tokens)
        for name, key in (
            ("bos", "bos_token_id"),
            ("eos", "eos_token_id"),
            ("unk", "unknown_token_id"),
            ("pad", "padding_token_id"),
        )
    }
    content["post_processor"] = _template(file, model, special, vocab)
    _check_builds(file, content)
    config: dict[str, Any] = {f"{n}_token": t for n, t in special.items()}
    config |= {
        "add_bos_token": content["post_processor"] is not None,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return {TOKENIZER_NAME: content, "tokenizer_config.json": config}


def _gpt2(file: GgufFile, tokens, types, vocab) -> dict[str, Any]:
    """Byte-level BPE: merges are texts of two tokens and a space between."""
    pre = KNOWN[file.metadata[_PREFIX + "pre"]]
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": pre_tokenizer(pre),
        "decoder": byte_level(),
        "model": _bpe(vocab, _merges(file), ignore_merges=pre.ignore_merges),
    }


def _merges(file: GgufFile) -> list[tuple[str, ...]]:
    merges = [tuple(m.split(" ")) for m in _get(file, "merges", list, [])]
    for i, merge in enumerate(merges):
        if len(merge) != 2:
            raise CheckpointError(
                f"{file.path}: merge {i} is {' '.join(merge)[:60]!r}, expected two "
                "tokens; copy it again"
            )
    return merges


_TO_SIGN = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_TO_SPACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
_BYTES_BACK = [_TO_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


def _gemma4(file: GgufFile, tokens, types, vocab) -> dict[str, Any]:
    """BPE on the characters of the whole text, whose spaces became signs."""
    return {
        "normalizer": _TO_SIGN,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": _BYTES_BACK},
        "model": _bpe(vocab, _merges(file)) | _fallback(file, tokens, types),
    }


def _fallback(file: GgufFile, tokens, types) -> dict[str, Any]:
    """What becomes of characters without a token: bytes, or the unknown token."""
    unknown = _special(file, "unknown_token_id", tokens)
    if unknown is None and _UNKNOWN in types:
        unknown = tokens[types.index(_UNKNOWN)]
    return {"unk_token": unknown, "fuse_unk": True, "byte_fallback": _BYTE in types}


def _llama(file: GgufFile, tokens, types, vocab) -> dict[str, Any]:
    """SentencePiece's BPE: of two neighbours, the pair of the best score is joined.

    So the merges are all cuts of a token into two tokens, best score first. Words begin
    with a space's sign; characters without a token become bytes.
    """
    scores = _get(file, "scores", np.ndarray, np.zeros(0)).tolist()
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{file.path} has {len(scores)} scores for {len(tokens)} tokens; copy it "
            "again"
        )
    joined = {t for id, t in enumerate(tokens) if types[id] in (_NORMAL, _USER)}
    ranked = []
    for id, token in enumerate(tokens):
        if types[id] != _NORMAL:
            continue
        if len(token) > _MAX_PIECE:
            raise CheckpointError(
                f"{file.path}: token {id} has {len(token)} characters, expected at "
                f"most {_MAX_PIECE}; copy it again"
            )
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in joined and right in joined:
                order = (-scores[id], id, vocab[left], vocab[right])
                ranked.append((order, (left, right)))
    ranked.sort(key=lambda pair: pair[0])
    normalizer, decoders = [_TO_SIGN], [*_BYTES_BACK]
    if _get(file, "add_space_prefix", bool, True):
        normalizer.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(vocab, [pair for _, pair in ranked])
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizer},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model | _fallback(file, tokens, types),
    }


def _bpe(vocab: dict[str, int], merges, ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _special(file: GgufFile, key: str, tokens: list[str]) -> str | None:
    """The token of an id in the metadata."""
    id = _get(file, key, int, None)
    if id is None:
        return None
    if not 0 <= id < len(tokens):
        raise CheckpointError(
            f"{file.path}: {_PREFIX}{key} is {id}, expected less than {len(tokens)}, "
            "the number of tokens; copy it again"
        )
    return tokens[id]


def _template(file: GgufFile, model: str, special, vocab) -> dict[str, Any] | None:
    """What is put before a text: begin-of-text, if the file or its kind says so."""
    if _get(file, "add_eos_token", bool, False):
        raise ConfigError(
            f"{file.path}: {_PREFIX}add_eos_token is True, expected False: a prompt "
            f"would end before it is continued; {_ADVICE}"
        )
    default = model != "gpt2" or KNOWN[file.metadata[_PREFIX + "pre"]].adds_bos
    bos = special["bos"]
    if not _get(file, "add_bos_token", bool, default) or bos is None:
        return None
    piece = {"SpecialToken": {"id": bos, "type_id": 0}}
    sequence = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [piece, sequence[0]],
        "pair": [piece, sequence[0], piece, sequence[1]],
        "special_tokens": {bos: {"id": bos, "ids": [vocab.get(bos)], "tokens": [bos]}},
    }


def _check_builds(file: GgufFile, content: dict[str, Any]) -> None:
    try:
        Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"{file.path}: its tokenizer cannot be built: {error}; copy it again"
        ) from error
