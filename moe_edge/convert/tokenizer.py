"""The tokenizer of a checkpoint, through the `tokenizers` library."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.models import BPE, WordLevel

from moe_edge.convert.special_tokens import read_special_tokens
from moe_edge.core.checks import CheckpointError
from moe_edge.core.json_reader import parse_json
from moe_edge.model.config import ModelConfig


def _byte_letters() -> dict[str, int]:
    """Letter -> byte, as byte-level BPE writes bytes (GPT-2): others from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
_MANY_IDS = 10_000  # are decoded while other threads go on (`decode` holds their lock)
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# NFC writes U+03B9 U+0344 (or three marks) as U+0390: 3.5 bytes as one, the most.
_NFC_BYTES = 4
_KEEPS_ALL = ("ByteLevel", "Digits", "Metaspace")  # steps that drop nothing of a text
_MAY_DROP = ("Split", "Punctuation")  # if told to


class Tokenizer:
    """Text <-> ids.

    Special and added tokens that only the files next to tokenizer.json name belong to
    it, too (`special_tokens.py`).

    Attributes:
      vocab_size: number of ids the tokenizer knows.
      folder: of its file; others of the tokenizer stand beside it.
    """

    def __init__(self, path: Path, config: ModelConfig):
        try:
            self._tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"cannot read tokenizer {path}: {error}") from error
        # Files may ask for padding and truncation; neither is wanted here.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        new = read_special_tokens(path.parent).add_to(self._tokenizer)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.folder = path.parent
        self._added = {
            id: token.content
            for id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._decoders = str(self._tokenizer.decoder)
        self._begin, self._end = _around(self._tokenizer)
        if self.vocab_size > config.vocab_size:
            more, names = "", ", ".join(new)[:60]
            if new:
                more = f" and the files next to it, which add {names}; take them out or"
            raise CheckpointError(
                f"{self.vocab_size} tokens exceed the model's vocabulary of "
                f"{config.vocab_size}: tokenizer {path}{more or ';'} use the tokenizer "
                "of this model"
            )

    def encode(self, text: str, *, begin: bool = True, end: bool = True) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer puts around it.

        Args:
          begin, end: False leaves out those before or after the text. A text that goes
            on has no end, a piece from the middle of a text neither.
        """
        found = self._tokenizer.encode(text, add_special_tokens=begin and end)
        return self._ids(found, begin, end)

    def encode_batch(
        self, texts: Sequence[str], *, begin: bool = True, end: bool = True
    ) -> list[list[int]]:
        """As `encode`, while other threads go on (`encode` holds Python's lock)."""
        found = self._tokenizer.encode_batch(
            list(texts), add_special_tokens=begin and end
        )
        return [self._ids(each, begin, end) for each in found]

    def _ids(self, found, begin: bool, end: bool) -> list[int]:
        """Ids of an encoding that has the special tokens of both sides or of none."""
        if begin == end:
            return found.ids
        return [*self._begin, *found.ids] if begin else [*found.ids, *self._end]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids; special tokens are left out unless asked for."""
        ids, skips = list(ids), not special
        if len(ids) > _MANY_IDS:
            return self._tokenizer.decode_batch([ids], skip_special_tokens=skips)[0]
        return self._tokenizer.decode(ids, skip_special_tokens=skips)

    def to_json(self) -> str:
        """The whole tokenizer in the form of tokenizer.json."""
        return self._tokenizer.to_str()

    def token(self, id: int) -> str | None:
        """A token as the vocabulary writes it; None for an unknown id."""
        return self._tokenizer.id_to_token(id)

    def special_id(self, text: str) -> int | None:
        """Id of a special token, which `decode` leaves out; None: it is none."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        found = (id for id, t in added if t.special and t.content == text)
        return next(found, None)

    def token_bytes(self, id: int) -> bytes:
        """What a token adds inside of a text; part of a character, for some.

        No bytes for an id that the tokenizer does not know.
        """
        if id in self._added:
            return self._added[id].encode("utf-8")
        token = self.token(id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders and all(letter in _BYTES for letter in token):
            return bytes(_BYTES[letter] for letter in token)
        if "ByteFallback" in self._decoders and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if "\u2581" in self._decoders:  # SentencePiece's space
            token = token.replace("\u2581", " ")
        return token.encode("utf-8")

    def longest(self) -> int | None:
        """UTF-8 bytes of a text that one token stands for at most.

        A text that is longer than so many times some tokens has more tokens. None for
        tokenizers that may drop letters, or fuse any number of them: there is no such
        limit. Reads the whole vocabulary.
        """
        tokenizer = self._tokenizer
        model, vocab = tokenizer.model, tokenizer.get_vocab()
        splits = [*_steps(tokenizer.pre_tokenizer, "pretokenizers")]
        is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
        if is_byte_level:
            known = all(letter in vocab for letter in _BYTES)
        else:
            known = getattr(model, "byte_fallback", False) and all(
                f"<0x{byte:02X}>" in vocab for byte in range(256)
            )
        added = tokenizer.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        cuts = any(
            step["type"] not in _KEEPS_ALL
            and (step["type"] not in _MAY_DROP or step["behavior"] == "Removed")
            for step in splits
        )
        if type(model) is not BPE or not known or strips or cuts:
            return None
        shrinks = 1
        for step in _steps(tokenizer.normalizer, "normalizers"):
            pattern = step.get("pattern", {}).get("String")
            if step["type"] == "NFC":
                shrinks *= _NFC_BYTES
            elif step["type"] == "Replace" and pattern is not None:
                if len(step["content"].encode()) < len(pattern.encode()):
                    return None
            elif step["type"] != "Prepend":
                return None
        texts = self._added.values()
        sizes = (
            len(token) if is_byte_level else len(token.encode())
            for token in vocab.keys() - texts
        )
        return shrinks * max([*sizes, *(len(text.encode()) for text in texts)])


def _around(tokenizer: _Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that a tokenizer puts before and after a text, such as a begin token."""
    if tokenizer.post_processor is None:
        return [], []
    probe = _Tokenizer(WordLevel({"x": 0}, unk_token="x"))
    probe.post_processor = tokenizer.post_processor
    found = probe.encode("x")
    if 0 not in found.special_tokens_mask:
        return found.ids, []
    at = found.special_tokens_mask.index(0)
    return found.ids[:at], found.ids[at + 1 :]


def _steps(part, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, one after another."""
    if part is None:
        return
    todo = [parse_json(type(part).__name__, part.__getstate__(), CheckpointError)]
    while todo:
        step = todo.pop(0)
        if step["type"] == "Sequence":
            todo = [*step[inner], *todo]
        else:
            yield step


def load_tokenizer(reader) -> Tokenizer:
    """The tokenizer of an open checkpoint.

    Raises:
      CheckpointError: the checkpoint has none, or it cannot be read.
    """
    path = reader.tokenizer_path
    if path is None:
        made = "hf/ of what moe-edge convert makes of it"
        where = reader.hf_files if reader.path.is_dir() else made
        raise CheckpointError(
            f"{reader.path} has no tokenizer.json; put the model's into {where}"
        )
    return Tokenizer(path, reader.config)
