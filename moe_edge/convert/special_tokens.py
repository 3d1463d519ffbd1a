"""Special and added tokens that files next to tokenizer.json name.

The files are merged as `transformers` 5 merges them:

- `added_tokens_decoder` of tokenizer_config.json numbers tokens. Only without it the
  older files, special_tokens_map.json and added_tokens.json, count.
- Special tokens have names: seven that every tokenizer knows, others that end in
  `_token`, and the names of a mapping `extra_special_tokens`. A list of that name, or
  of the name `additional_special_tokens`, holds special tokens without names.
- Tokens that tokenizer.json lacks are appended to its vocabulary. A token that then has
  another id than a file says is refused: the model was trained with the file's.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from moe_edge.core.checks import CheckpointError
from moe_edge.core.json_reader import read_json

CONFIG = "tokenizer_config.json"
_MAP = "special_tokens_map.json"
_ADDED = "added_tokens.json"
_DECODER, _EXTRA = "added_tokens_decoder", "extra_special_tokens"
_OLD_EXTRA = "additional_special_tokens"
_NAMES = tuple(f"{n}_token" for n in "bos eos unk sep pad cls mask".split())
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """What the files of a folder say.

    Attributes:
      named: special tokens by name, such as `bos_token`; standard names come first.
      extra: special tokens without a name.
      numbered: id -> token.
      source: the file that numbers tokens.
      splits: whether special tokens in a text are encoded like ordinary text.
    """

    named: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    numbered: Mapping[int, AddedToken]
    source: str
    splits: bool

    @property
    def names(self) -> dict[str, str]:
        """Name -> text: what chat templates know."""
        return {name: token.content for name, token in self.named.items()}

    def add_to(self, tokenizer: Tokenizer) -> list[str]:
        """Adds the tokens to a tokenizer; returns the texts that were new to it.

        Raises:
          CheckpointError: a token has another id than a file says.
        """
        known = tokenizer.get_added_tokens_decoder()
        texts = {token.content for token in known.values()}
        kept = {repr(token) for token in known.values()}  # with their flags
        adding = []
        for _, token in sorted(self.numbered.items()):
            # Of the older file only the id counts where tokenizer.json has flags.
            has_flags = self.source == _ADDED and token.content in texts
            if repr(token) not in kept and not has_flags:
                adding.append(token)
        texts |= {token.content for token in adding}
        for token in (*self.named.values(), *self.extra):
            if token.content not in texts:
                texts.add(token.content)
                adding.append(token)
        names, before = set(self.names.values()), tokenizer.get_vocab()
        for token in adding:
            token.special = token.special or token.content in names
        tokenizer.add_tokens(adding)
        tokenizer.encode_special_tokens = self.splits
        for id, token in self.numbered.items():
            found = tokenizer.token_to_id(token.content)
            if token.content and found != id:
                raise CheckpointError(
                    f"{self.source} says that token {token.content[:60]!r} is {id}, "
                    f"with tokenizer.json it is {found}; use the files of one tokenizer"
                )
        texts = [token.content for token in adding if token.content]
        return [text for text in texts if text not in before]


def read_tokenizer_config(folder: Path | None) -> dict[str, Any]:
    """tokenizer_config.json of a folder; empty without such a file.

    Raises:
      CheckpointError: it cannot be read.
    """
    return _read(folder, CONFIG)


def read_special_tokens(folder: Path | None) -> SpecialTokens:
    """Reads the files of a folder; nothing without one.

    Raises:
      CheckpointError: a file that cannot be read, or a value of another kind.
    """
    config, source = read_tokenizer_config(folder), CONFIG
    named = _named(config, CONFIG)
    extra = _extra(config, CONFIG)
    if isinstance(extra, dict):
        named, extra = named | extra, None
    if _DECODER in config:
        entries = _mapping(f"{CONFIG}: {_DECODER}", config[_DECODER])
        numbered = {
            _id(f"{CONFIG}: {_DECODER}", id): _token(f"{CONFIG}: token {id}", token)
            for id, token in entries.items()
        }
    else:
        older, source = _read(folder, _MAP), _ADDED
        named |= {
            name: token
            for name, token in _named(older, _MAP).items()
            if name in _NAMES or name not in named
        }
        more = _extra(older, _MAP)
        if isinstance(more, dict):
            named, more = named | more, None
        elif more and older.get(_EXTRA):
            extra, more = [*(extra or ()), *more], None
        standard = [token for name, token in named.items() if name in _NAMES and token]
        special = {token.content for token in (*standard, *(extra or ()))}
        extra = more if extra is None else extra
        numbered = {
            _id(_ADDED, id): AddedToken(
                text, normalized=text not in special, special=text in special
            )
            for text, id in _read(folder, _ADDED).items()
        }
    splits = config.get("split_special_tokens", False)
    if not isinstance(splits, bool):
        raise _wrong(f"{CONFIG}: split_special_tokens", splits, "true or false")
    order = [*_NAMES, *(name for name in named if name not in _NAMES)]
    return SpecialTokens(
        {name: named[name] for name in order if named.get(name) is not None},
        tuple(extra or ()),
        numbered,
        source,
        splits,
    )


def _named(config: dict[str, Any], file: str) -> dict[str, AddedToken | None]:
    """Tokens by name; None where a standard name says that there is none."""
    found = {}
    for name, value in config.items():
        if name in _NAMES:
            where = f"{file}: {name}"
            found[name] = None if value is None else _token(where, value, True)
        elif name.endswith("_token") and isinstance(value, str | dict):
            found[name] = _token(f"{file}: {name}", value, True)
    return found


def _extra(
    config: dict[str, Any], file: str
) -> list[AddedToken] | dict[str, AddedToken] | None:
    """Special tokens under one of two names; None where there is neither."""
    name = _EXTRA if config.get(_EXTRA) or _OLD_EXTRA not in config else _OLD_EXTRA
    value, where = config.get(name), f"{file}: {name}"
    if value is None:
        return None
    if isinstance(value, dict):
        return {each: _token(where, token, True) for each, token in value.items()}
    if not isinstance(value, list):
        raise _wrong(where, value, "a list of tokens, or tokens by name")
    return [_token(where, token, True) for token in value]


def _token(where: str, value: Any, special: bool = False) -> AddedToken:
    """A token of a text, or of an object with its text and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise _wrong(where, value, 'a token such as "<s>" or {"content": "<s>"}')
    flags = {"special": special} | {n: value[n] for n in _FLAGS if n in value}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise _wrong(f"{where}: {name}", flag, "true or false")
    return AddedToken(content, **flags)


def _id(where: str, value: Any) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise _wrong(where, value, "a whole number as a token's id") from None


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    return value


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    """A JSON object of a folder; empty without the file."""
    if folder is None or not (folder / name).is_file():
        return {}
    return _mapping(
        str(folder / name), read_json(folder / name, CheckpointError, finite=False)
    )


def _wrong(where: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is {value!r:.60}, expected {expected}; copy the tokenizer's files "
        "again"
    )
