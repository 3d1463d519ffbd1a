"""Calibration text of named domains as windows of tokens."""

import collections
import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.evaluate.plain_text import read_plain_text
from moe_edge.evaluate.texts import find_path, sha256_of

MAX_CHARACTERS = 16  # of a token on average: so much of a long file is tokenised


class TextFile(NamedTuple):
    """One file of a domain."""

    domain: str
    path: str


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Windows of all domains, one after another; N windows of W tokens.

    Attributes:
      tokens_NW: int32, right-padded.
      valid_NW: bool, False for padding.
      domain_N: int32, index into `domains`.
      domains: names, in the order given.
      files: {domain, path, sha256, tokens} of every file.
    """

    tokens_NW: np.ndarray
    valid_NW: np.ndarray
    domain_N: np.ndarray
    domains: tuple[str, ...]
    files: tuple[dict, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.valid_NW.sum())

    @property
    def domain_T(self) -> np.ndarray:
        """Domain of every token that is no padding."""
        return np.repeat(self.domain_N, self.valid_NW.sum(axis=1))


def parse_files(text: str, data_dir: str | None = None) -> list[TextFile]:
    """Files of `[name:]path,[name:]path,...`; the same name twice is one domain.

    Without a name, the file's own without its ending names the domain.

    Raises:
      ConfigError: no file, an empty name, a file that does not exist, or one twice.
    """
    files = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, path = Path(part).stem, find_path(part, data_dir)
        if ":" in part and not Path(path).exists():
            name, rest = part.split(":", 1)
            path = find_path(rest, data_dir)
        if not name or not Path(path).is_file():
            raise ConfigError(
                f"calibration text {part!r} is no file; expected PATH or NAME:PATH, "
                "several separated by commas"
            )
        files.append(TextFile(name, path))
    if not files:
        raise ConfigError("no calibration text; give --text FILE[,NAME:FILE...]")
    resolved = [Path(file.path).resolve() for file in files]
    for nth, path in enumerate(resolved):
        if path in resolved[:nth]:
            raise ConfigError(
                f"calibration text {files[nth].path} is given twice, so its tokens "
                "would count twice; name every file once"
            )
    return files


def read_calibration(
    files: list[TextFile], tokenizer, window: int, max_tokens: int | None
) -> Calibration:
    """Tokenises the beginning of every file and cuts it into windows.

    Args:
      files: from `parse_files`.
      tokenizer: offers `encode`.
      window: tokens of a window; each window is read without what stood before it.
      max_tokens: of all domains together: every domain gets an equal share, and every
        file an equal share of its domain's; a shorter file uses less. None: all.
    Raises:
      RequestError: a file without text, or not UTF-8.
      ConfigError: fewer tokens than give every file one.
    """
    domains = tuple(dict.fromkeys(file.domain for file in files))
    siblings = collections.Counter(file.domain for file in files)
    needed = len(domains) * max(siblings.values())
    if max_tokens is not None and max_tokens < needed:
        raise ConfigError(
            f"tokens {max_tokens} are too few for {len(files)} files of {len(domains)} "
            f"domains in equal shares; expected at least {needed}, see --tokens"
        )
    rows, owners, facts = [], [], []
    for file in files:
        limit = None
        if max_tokens is not None:
            limit = max_tokens // (len(domains) * siblings[file.domain])
        ids = _encode(tokenizer, read_plain_text(file.path), limit)
        if not ids:
            raise RequestError(f"{file.path} holds no token; expected some text")
        known = {"sha256": sha256_of(file.path), "tokens": len(ids)}
        facts.append(file._asdict() | known)
        cut = [ids[i : i + window] for i in range(0, len(ids), window)]
        rows += cut
        owners += [domains.index(file.domain)] * len(cut)
    lengths_N = np.array([len(row) for row in rows])
    valid_NW = np.arange(window)[None, :] < lengths_N[:, None]
    tokens_NW = np.zeros(valid_NW.shape, np.int32)
    tokens_NW[valid_NW] = [token for row in rows for token in row]
    return Calibration(
        tokens_NW, valid_NW, np.array(owners, np.int32), domains, tuple(facts)
    )


def _encode(tokenizer, text: str, limit: int | None) -> list[int]:
    """The first `limit` tokens, without tokenising much more than them."""
    if limit is not None:
        beginning = text[: limit * MAX_CHARACTERS]
        ids = tokenizer.encode(beginning, end=False)
        if len(ids) >= limit or beginning == text:
            return ids[:limit]
    return tokenizer.encode(text, end=False)[:limit]
