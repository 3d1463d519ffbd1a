"""Real prompts for studies, all of one length, and what they came from."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_edge.bench.quickstart.texts import BOOKS
from moe_edge.bench.settings import FromZero, Positive, Steps, StudySettings
from moe_edge.bench.started import start_number
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import Tokenizer, load_tokenizer
from moe_edge.core.checks import RequestError
from moe_edge.engine.load import check_checkpoint
from moe_edge.engine.prompts import read_prompts
from moe_edge.evaluate.texts import find_file, read_text, sha256_of

QUESTION = ("choices", "answer_index")  # keys of a question, whose prompt is used
PIECE = 1 << 14  # characters of a text that are tokenised at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings(StudySettings):
    """A study that runs a model on real prompts.

    Attributes:
      checkpoint: path or `default`.
      data_dir: where `sources` are looked up; without it prompts come from the packaged
        held-out text.
      sources: prompt files (`.jsonl` with `prompt`, or plain text), used in turn.
      rounds: measured repetitions, each with prompts of its own.
      prompt_tokens, new_tokens: of each sequence.
    """

    checkpoint: str = "default"
    data_dir: str | None = None
    sources: Sequence[str] = (
        "prompts/gsm8k.jsonl",
        "mcq/boolq.jsonl",
        "prompts/gaokao_english_reading.jsonl",
    )
    rounds: int = 3
    prompt_tokens: int = 40
    new_tokens: Steps = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSettings(StudySettings):
    """A study over an emulated link.

    Attributes:
      link_factor: time of an expert's bytes on the link, in layers of resident
        compute; `link_latency_s` comes on top.
    """

    link_factor: Positive = 2.0
    link_latency_s: FromZero = 50e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyLinkSettings(LinkSettings):
    """A study over an emulated link or the machine's own.

    Attributes:
      link_factor: as of `LinkSettings`; None: the machine's own link, as it is, and on
        a GPU experts in pinned memory.
    """

    link_factor: Positive | None = 2.0


def check_inputs(settings: PromptSettings) -> None:
    """Refuses a checkpoint (CheckpointError) or prompt files (OSError) that cannot be
    read, before weights are."""
    check_checkpoint(settings.checkpoint)
    prompt_files(settings)


def tokenizer_of(settings: PromptSettings) -> Tokenizer:
    """The checkpoint's."""
    return load_tokenizer(open_checkpoint(settings.checkpoint))


@dataclasses.dataclass(frozen=True)
class PromptPool:
    """Token rows of one length, handed out in order; no row is given twice.

    Attributes:
      rows: token ids.
      sources: {path, sha256} of every file read.
    """

    rows: Sequence[list[int]]
    sources: Sequence[dict[str, str]]

    def batches(self, sizes: Sequence[int]) -> list[list[list[int]]]:
        """As many rows as each size says, in order."""
        rows = iter(self.rows)
        return [list(itertools.islice(rows, size)) for size in sizes]


def prompt_files(settings: PromptSettings) -> list[Path]:
    """The files that prompts come from. Raises OSError for one that does not exist."""
    if settings.data_dir is None:
        return [BOOKS]
    paths = [Path(find_file(name, settings.data_dir)) for name in settings.sources]
    for path in paths:
        with path.open("rb"):
            pass
    return paths


def make_pool(
    settings: PromptSettings,
    tokenizer: Tokenizer,
    count: int,
    tokens: int,
    *,
    at_most: bool = False,
    before: int | None = None,
) -> PromptPool:
    """`count` rows of exactly `tokens` tokens, from all files in turn.

    A row is the beginning of a prompt that is long enough, or a piece of a text. Every
    start of a study has rows of its own.

    Args:
      at_most: as many as there are will do.
      before: rows that are passed over; None: those of the starts before this one.

    Raises:
      RequestError: the files do not hold so many.
      OSError: a file cannot be read.
    """
    paths = prompt_files(settings)
    turns = itertools.zip_longest(*(_rows(path, tokenizer, tokens) for path in paths))
    in_turn = (row for turn in turns for row in turn if row is not None)
    before = count * (start_number() or 0) if before is None else before
    all_rows = list(itertools.islice(in_turn, before + count))
    rows = all_rows[before:]
    if len(rows) < count and not at_most:
        names = ", ".join(path.name for path in paths)
        raise RequestError(
            f"{names} hold {len(all_rows)} prompts of {tokens} tokens, "
            f"{before + count} are needed; give longer files, shorter prompts, fewer "
            "rounds or fewer starts"
        )
    sources = [{"path": _name(p, settings), "sha256": sha256_of(p)} for p in paths]
    return PromptPool(rows, sources)


def forced_pool(
    settings: PromptSettings, tokenizer: Tokenizer, count: int
) -> PromptPool:
    """Texts by which fidelity is judged: a prompt, and `new_tokens` that are scored.
    Raises as `make_pool`."""
    length = settings.prompt_tokens + settings.new_tokens
    return make_pool(settings, tokenizer, count, length)


def _name(path: Path, settings: PromptSettings) -> str:
    """Without the folders above the data, which differ from machine to machine."""
    if settings.data_dir and path.is_relative_to(settings.data_dir):
        return path.relative_to(settings.data_dir).as_posix()
    return path.name


def _rows(path: Path, tokenizer: Tokenizer, tokens: int) -> Iterator[list[int]]:
    if path.suffix == ".jsonl":
        for prompt in read_prompts(path, QUESTION):
            ids = tokenizer.encode(prompt.text, end=False)
            if len(ids) >= tokens:
                yield list(ids[:tokens])
        return
    text, left = read_text(path), []
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE]
        left += tokenizer.encode(piece, begin=start == 0, end=False)
        while len(left) >= tokens:
            yield left[:tokens]
            left = left[tokens:]
