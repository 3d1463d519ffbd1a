"""Token streams by domain, and batches whose order is a function of one number.

A domain's documents become one stream of tokens, each document ended by
`<|endoftext|>`. The stream is cut into chunks of `CHUNK` tokens that overlap by one,
so that every token is a target once. Chunks are drawn by domain in fixed proportions
and shuffled within a domain for each epoch. The position in the data is the number of
chunks drawn: resuming needs nothing else. A sequence never mixes domains, so that
routing can be measured by domain.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

from moe_edge.core.checks import ConfigError
from moe_edge.training import generators
from moe_edge.training.text import SOURCES, source_documents, split_documents
from moe_edge.training.tokenizer import END_OF_TEXT, train_tokenizer

CHUNK = 512
TASK_SHARE = 0.28  # of all tokens, shared equally by the task families
_TOKENIZER_CHARACTERS = 1_500_000  # of a domain at most


class Batch(NamedTuple):
    """Rows that one step learns from.

    Attributes:
      rows: int32 [B, S + 1], inputs and shifted targets.
      weights: float32 [B, S], of each target in the loss, most of them 0; None: all
        are alike.
    """

    rows: np.ndarray
    weights: np.ndarray | None = None


class Source(Protocol):
    """Batches whose order is a function of one number.

    Attributes:
      position: chunks drawn so far, or rows; what resuming needs.
    """

    position: int

    def skip_to(self, position: int) -> None:
        """Moves to a position."""

    def next_batch(self, chunks: int, length: int) -> Batch:
        """`chunks * CHUNK` tokens in rows of `length`."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens of every domain.

    Attributes:
      train: domain -> int32 stream.
      held_out: domain -> int32 stream, never trained on.
      shares: domain -> share of the training tokens, summing to one.
    """

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    shares: dict[str, float]

    @property
    def domains(self) -> list[str]:
        return list(self.train)


def check_data_dir(data_dir: Path) -> None:
    """Raises ConfigError if a training text cannot be read.

    A data folder that is missing altogether is fine: see `load_texts`.
    """
    if not data_dir.is_dir():
        return
    for path in (data_dir / name for source in SOURCES for name in source.files):
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise ConfigError(
                f"training text {path} is missing or cannot be read; expected the "
                "files of the data folder below --data_dir"
            )


def load_texts(
    data_dir: Path | None, task_characters: int, seed: int
) -> tuple[dict[str, tuple[list[str], list[str]]], dict[str, float]]:
    """Documents by domain as (training, held-out), and the domains' shares.

    Without a data folder only code and tasks remain, which is said on stderr.
    """
    texts, shares = {}, {}
    present = data_dir is not None and data_dir.is_dir()
    if not present:
        print(
            f"no text folder at {data_dir}: training on the Python standard library "
            "and generated tasks only",
            file=sys.stderr,
        )
    for source in SOURCES:
        if present or not source.files:
            texts[source.domain] = split_documents(
                source_documents(source, data_dir or Path())
            )
            shares[source.domain] = source.share
    scale = (1 - TASK_SHARE) / sum(shares.values())
    shares = {domain: share * scale for domain, share in shares.items()}
    for family in generators.FAMILIES:
        texts[family] = (
            generators.documents(family, f"train-{seed}", task_characters),
            generators.documents(family, f"held-out-{seed}", 60_000),
        )
        shares[family] = TASK_SHARE / len(generators.FAMILIES)
    return texts, shares


def fit_tokenizer(texts: dict[str, tuple[list[str], list[str]]], vocab_size: int):
    """Trains the tokenizer on the start of every domain's training documents."""

    def sample():
        for train, _ in texts.values():
            left = _TOKENIZER_CHARACTERS
            for document in train:
                if left <= 0:
                    break
                yield document[:left]
                left -= len(document)

    return train_tokenizer(sample(), vocab_size)


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """One int32 stream; every document is followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
        ids += encoding.ids
        ids.append(end)
    return np.array(ids, np.int32)


def build_corpus(tokenizer: Tokenizer, texts, shares) -> Corpus:
    """Encodes every domain.

    Raises:
      ConfigError: a domain is shorter than one chunk.
    """
    train, held_out = {}, {}
    for domain, (train_documents, held_out_documents) in texts.items():
        train[domain] = encode_documents(tokenizer, train_documents)
        held_out[domain] = encode_documents(tokenizer, held_out_documents)
        if train[domain].size <= CHUNK:
            raise ConfigError(
                f"domain {domain!r} has {train[domain].size} training tokens, expected "
                f"more than {CHUNK}; give it more text"
            )
    return Corpus(train, held_out, shares)


def check_length(length: int) -> None:
    """Raises ConfigError if rows of `length` tokens do not fill a chunk."""
    if CHUNK % length:
        raise ConfigError(f"sequence length {length} must divide {CHUNK}")


class ChunkOrder:
    """Which chunk is drawn n-th: domain by largest deficit, shuffled by epoch."""

    def __init__(self, corpus: Corpus, seed: int):
        self._corpus, self._seed = corpus, seed
        self._sizes = {d: (s.size - 1) // CHUNK for d, s in corpus.train.items()}
        self._drawn = dict.fromkeys(corpus.domains, 0)
        self._orders: dict[str, tuple[int, np.ndarray]] = {}
        self.position = 0

    def skip_to(self, position: int) -> None:
        """Moves to a position without reading tokens."""
        while self.position < position:
            self._next_domain()

    def _next_domain(self) -> str:
        self.position += 1
        shares, drawn = self._corpus.shares, self._drawn
        domain = max(shares, key=lambda d: shares[d] * self.position - drawn[d])
        drawn[domain] += 1
        return domain

    def next_chunk(self) -> tuple[str, np.ndarray]:
        """Domain and `CHUNK + 1` tokens."""
        domain = self._next_domain()
        epoch, nth = divmod(self._drawn[domain] - 1, self._sizes[domain])
        if self._orders.get(domain, (-1, None))[0] != epoch:
            domain_id = self._corpus.domains.index(domain)
            rng = np.random.default_rng([self._seed, domain_id, epoch])
            self._orders[domain] = (epoch, rng.permutation(self._sizes[domain]))
        start = int(self._orders[domain][1][nth]) * CHUNK
        return domain, self._corpus.train[domain][start : start + CHUNK + 1]

    def next_batch(self, chunks: int, length: int) -> Batch:
        """CHUNK / length rows of every chunk.

        Raises:
          ConfigError: `length` does not divide CHUNK.
        """
        check_length(length)
        rows = []
        for _ in range(chunks):
            _, chunk = self.next_chunk()
            rows += [chunk[s : s + length + 1] for s in range(0, CHUNK, length)]
        return Batch(np.stack(rows))


def held_out_rows(stream: np.ndarray, rows: int, length: int) -> np.ndarray:
    """int32 [rows, length + 1] from a held-out stream, wrapping if it is short."""
    need = rows * length + 1
    stream = np.resize(stream, need) if stream.size < need else stream[:need]
    return np.stack([stream[i * length : (i + 1) * length + 1] for i in range(rows)])
