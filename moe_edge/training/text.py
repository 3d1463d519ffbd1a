"""Training text: where every domain comes from, cleaned, and split for training.

A domain is a list of documents. The last `HELD_OUT` of a domain's characters never
trains; wikitext-2's own valid and test files are not read at all. Sources, licences
and rules are listed in `SOURCES`, which the model card prints.
"""

import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.plain_text import undo_wikitext

HELD_OUT = 0.05
_PIECE = 4000  # characters of a document cut from a text without documents
_STDLIB_BYTES = 4_500_000
_STDLIB_SKIP = frozenset(
    "test tests idlelib lib2to3 site-packages dist-packages encodings pydoc_data "
    "ensurepip turtledemo __pycache__ __phello__ msilib".split()
)


class Source(NamedTuple):
    """One text domain."""

    domain: str
    files: tuple[str, ...]  # below data_dir; empty: the running Python's library
    licence: str
    origin: str
    share: float  # of the training tokens, before scaling to one


BOOKS = (
    "bleak_house brothers_karamazov chekhov_short_fiction count_of_monte_cristo "
    "david_copperfield decline_and_fall_of_the_roman_empire don_quixote frankenstein "
    "huckleberry_finn innocents_abroad les_miserables middlemarch origin_of_species "
    "pepys_diary pickwick_papers pride_and_prejudice sherlock_holmes "
    "twenty_thousand_leagues ulysses vanity_fair war_and_peace way_we_live_now"
).split()

SOURCES = (
    Source(
        "wikitext",
        ("text/wikitext-2/train.txt",),
        "CC BY-SA 3.0",
        "wikitext-2 train (Wikipedia), tokenisation undone",
        0.22,
    ),
    Source(
        "wikipedia",
        ("text/wikipedia_en.txt",),
        "CC BY-SA 3.0",
        "Wikipedia articles, sample carried by LLaMA-Factory",
        0.03,
    ),
    Source(
        "web",
        ("text/c4_web.txt",),
        "ODC-BY 1.0",
        "C4, sample carried by allenai/OLMoE",
        0.04,
    ),
    Source(
        "books",
        tuple(f"text/books/{book}.txt" for book in BOOKS),
        "CC0 1.0 / public domain",
        "Standard Ebooks: " + ", ".join(b.replace("_", " ").title() for b in BOOKS),
        0.28,
    ),
    Source(
        "shakespeare",
        ("text/tinyshakespeare.txt",),
        "public domain",
        "tiny Shakespeare (karpathy/char-rnn)",
        0.02,
    ),
    Source("code", (), "PSF-2.0", "Python standard library of this installation", 0.13),
)


def _pieces(text: str) -> list[str]:
    """Cuts a long text into documents at blank lines."""
    documents, current, length = [], [], 0
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip()
        if not paragraph:
            continue
        current.append(paragraph)
        length += len(paragraph)
        if length >= _PIECE:
            documents.append("\n\n".join(current))
            current, length = [], 0
    return documents + (["\n\n".join(current)] if current else [])


def stdlib_documents(limit_bytes: int | None = None) -> list[str]:
    """Source files of the standard library, a bounded sample in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in root.rglob("*.py")
        if not _STDLIB_SKIP & set(path.relative_to(root).parts)
    ]
    # Ordered by reversed name: neighbours in the list come from unlike packages.
    files.sort(key=lambda path: (path.stem[::-1], str(path.relative_to(root))))
    documents, total = [], 0
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not 500 <= len(text) <= 200_000:
            continue
        documents.append(text)
        total += len(text)
        if total >= (limit_bytes or _STDLIB_BYTES):
            break
    return documents


def source_documents(source: Source, data_dir: Path) -> list[str]:
    """All documents of a source, in file order.

    Raises:
      ConfigError: a file is missing.
    """
    if not source.files:
        return stdlib_documents()
    documents = []
    for name in source.files:
        path = data_dir / name
        if not path.is_file():
            raise ConfigError(
                f"training text {path} is missing; expected the files of the data "
                "folder below --data_dir (without that folder, code and tasks train)"
            )
        text = path.read_text(encoding="utf-8")
        if source.domain == "wikitext":
            documents += undo_wikitext(text)
        elif source.domain in ("wikipedia", "web"):  # one document a line
            documents += [line.strip() for line in text.split("\n") if line.strip()]
        else:
            documents += _pieces(text)
    return documents


def split_documents(documents: list[str]) -> tuple[list[str], list[str]]:
    """(training, held-out): the held-out part is a tail of about HELD_OUT.

    The document in which the border falls is cut there, so that a domain of few long
    documents is divided too.
    """
    border = int(sum(map(len, documents)) * (1 - HELD_OUT))
    train, held_out, seen = [], [], 0
    for document in documents:
        cut = min(max(border - seen, 0), len(document))
        if cut:
            train.append(document[:cut])
        if cut < len(document):
            held_out.append(document[cut:])
        seen += len(document)
    return train, held_out
