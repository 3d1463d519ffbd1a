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
from collections.abc import Collection, Mapping, Sequence
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

Token = str | AddedToken  # with flags, if a file gives them


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """What the files of a folder say.

    Attributes:
      named: special tokens by name, such as `bos_token`, in the order of adding them.
      extra: special tokens without a name.
      numbered: id -> token.
      source: the file that numbers tokens.
      splits: whether special tokens in a text are encoded like ordinary text.
    """

    named: Mapping[str, Token]
    extra: Sequence[Token]
    numbered: Mapping[int, AddedToken]
    source: str
    splits: bool

    @property
    def names(self) -> dict[str, str]:
        """Name -> text: what chat templates know."""
        return {name: _text(token) for name, token in self.named.items()}

    def add_to(self, tokenizer: Tokenizer) -> list[str]:
        """Adds the tokens to a tokenizer; returns the texts that were new to it.

        Raises:
          CheckpointError: a token has another id than a file says.
        """
        known = tokenizer.get_added_tokens_decoder()
        # The flags in tokenizer.json count more than those of the older files.
        numbered = self.numbered | known if self.source == _ADDED else self.numbered
        adding: list[Token] = [token for _, token in sorted(numbered.items())]
        texts = {token.content for token in (*known.values(), *adding)}
        for token in (*self.named.values(), *self.extra):
            if _text(token) not in texts and token not in adding:
                adding.append(token)
        names = self.names.values()
        tokens = [_token("", token, True) for token in adding]
        for token in tokens:
            token.special = token.special or token.content in names
        texts = dict.fromkeys(token.content for token in tokens if token.content)
        new = [text for text in texts if tokenizer.token_to_id(text) is None]
        tokenizer.add_tokens(tokens)
        tokenizer.encode_special_tokens = self.splits
        for id, token in self.numbered.items():
            found = tokenizer.token_to_id(token.content)
            if token.content and found != id:
                raise CheckpointError(
                    f"{self.source} says that token {token.content[:60]!r} is {id}, "
                    f"with tokenizer.json it is {found}; use the files of one tokenizer"
                )
        return new


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
    # Names that are not standard; those of tokens without flags are added last.
    last = {n: t for n, t in named.items() if n not in _NAMES and isinstance(t, str)}
    extra, unnamed = _extra(config, CONFIG, _EXTRA), _extra(config, CONFIG, _OLD_EXTRA)
    if not extra and unnamed is not None:
        extra, unnamed = unnamed, None
    if isinstance(extra, dict):
        last, extra = last | extra, None
    if _DECODER in config:
        numbered = _numbered(config[_DECODER])
    else:
        older, source = _read(folder, _MAP), _ADDED
        named |= _named(older, _MAP)
        more = _extra(older, _MAP, _EXTRA)
        if isinstance(more, dict):
            last, extra = last | more, None
        elif more is not None:
            extra = [*(extra or ()), *more]
        unnamed = _extra(older, _MAP, _OLD_EXTRA) or unnamed
        # As in transformers, tokens with flags in tokenizer_config.json do not count.
        standard = [(name, named[name]) for name in _NAMES if named.get(name)]
        special = [t for name, t in standard if name in older or isinstance(t, str)]
        special += [t for t in extra or () if isinstance(t, str) or t in (more or ())]
        numbered = _added(_read(folder, _ADDED), set(map(_text, special)))
    if extra is None:
        extra = unnamed
    if isinstance(extra, dict):
        last, extra = last | extra, None
    splits = config.get("split_special_tokens", False)
    if not isinstance(splits, bool):
        raise _wrong(f"{CONFIG}: split_special_tokens", splits, "true or false")
    first = {name: named.get(name) for name in _NAMES}
    others = {n: t for n, t in named.items() if n not in first and n not in last}
    ordered = first | others | last
    return SpecialTokens(
        {name: token for name, token in ordered.items() if token is not None},
        extra or (),
        numbered,
        source,
        splits,
    )


def _numbered(entries: Any) -> dict[int, AddedToken]:
    """Id -> token of `added_tokens_decoder`."""
    where = f"{CONFIG}: {_DECODER}"
    return {
        _id(where, id): _token(f"{CONFIG}: token {id}", token, False)
        for id, token in _mapping(where, entries).items()
    }


def _added(entries: dict[str, Any], special: Collection[str]) -> dict[int, AddedToken]:
    """Id -> token of added_tokens.json."""
    return {
        _id(_ADDED, id): AddedToken(
            text, normalized=text not in special, special=text in special
        )
        for text, id in entries.items()
    }


def _text(token: Token) -> str:
    return token if isinstance(token, str) else token.content


def _named(config: dict[str, Any], file: str) -> dict[str, Token | None]:
    """Tokens by name; None where a standard name says that there is none."""
    found = {}
    for name, value in config.items():
        if name in _NAMES and value is None:
            found[name] = None
        elif name in _NAMES or (
            name.endswith("_token") and isinstance(value, str | dict)
        ):
            found[name] = _given(f"{file}: {name}", value)
    return found


def _extra(
    config: dict[str, Any], file: str, name: str
) -> list[Token] | dict[str, Token] | None:
    """Special tokens without names of their own, or by name; None: it says nothing."""
    value, where = config.get(name), f"{file}: {name}"
    if value is None:
        return None
    if isinstance(value, dict):
        return {each: _given(where, token) for each, token in value.items()}
    if not isinstance(value, list):
        raise _wrong(where, value, "a list of tokens, or tokens by name")
    return [_given(where, token) for token in value]


def _given(where: str, value: Any) -> Token:
    """A special token as a file gives it: with flags, or as its text alone."""
    if isinstance(value, str):
        return value
    # tokenizer_config.json marks its objects, and says of each whether it is special.
    special = not (isinstance(value, dict) and "__type" in value)
    return _token(where, value, special)


def _token(where: str, value: Any, special: bool) -> AddedToken:
    """A token from its text, or from an object with its text and flags."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=special)
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
        str(folder / name), read_json(folder / name, CheckpointError, strict=False)
    )


def _wrong(where: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is {value!r:.60}, expected {expected}; copy the tokenizer's files "
        "again"
    )
