"""Texts that a refactoring reads: tokens to measure on, windows to fine-tune on."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.core.tables import PACKAGE
from moe_edge.evaluate.plain_text import read_plain_text
from moe_edge.evaluate.texts import find_path, read_text, sha256_of
from moe_edge.papers.moe_prism.refactor.finetune.settings import FineTuning

PACKAGED = PACKAGE / "evaluate/held_out/books.txt"
HELD_OUT = 0.05  # of the training text


def read_ids(reader, text, data_dir, limit: int) -> tuple[list[int], dict]:
    """Tokens of the held-out text, and its name and hash.

    Raises:
      RequestError: a text without a token that has one before it.
    """
    path = str(PACKAGED) if text is None else find_path(text, data_dir)
    content = read_text(path)
    # A token has at least one character; most have three.
    ids = load_tokenizer(reader).encode(content[: 16 * limit], end=False)[:limit]
    if len(ids) < 2:
        raise RequestError(
            f"{path} has {len(ids)} tokens read, expected at least 2, since the first "
            "is never scored; give a longer --text or --max_text_tokens"
        )
    return ids, {"path": path, "sha256": sha256_of(path), "tokens": len(ids)}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Tokens cut into windows that overlap by one, so that each is a target once.

    The order of batches is a function of their number.

    Attributes:
      train: int32 [N, S + 1].
      held_out: int32 [M, S + 1], never trained on.
      sha256: of the training text.
    """

    train: np.ndarray
    held_out: np.ndarray
    sha256: str

    @property
    def train_tokens(self) -> int:
        """Targets of one epoch."""
        return self.train.shape[0] * (self.train.shape[1] - 1)

    def batch(self, nth: int, rows: int, seed: int) -> np.ndarray:
        """The nth batch, int32 [rows, S + 1]; each epoch is shuffled differently."""
        size, picked = len(self.train), []
        at = nth * rows
        while len(picked) < rows:
            epoch, first = divmod(at + len(picked), size)
            order = np.random.default_rng([seed, epoch]).permutation(size)
            picked += order[first : first + rows - len(picked)].tolist()
        return self.train[picked]


def cut(ids: Sequence[int], window: int) -> np.ndarray:
    """Windows [N, window + 1] of a stream; the rest at the end is left out."""
    stream = np.asarray(ids, np.int32)
    count = max(0, (stream.size - 1) // window)
    starts = np.arange(count)[:, None] * window
    return stream[starts + np.arange(window + 1)[None, :]]


def read_windows(reader, paths: Sequence[str], settings: FineTuning) -> Windows:
    """Reads and cuts texts; the last `HELD_OUT` of their tokens is not trained on.

    Args:
      reader: of the model, for its tokenizer.
      paths: UTF-8 files.
      settings: `window` tokens are a window; at most `held_out_rows` of the held-out
        ones are kept, spread evenly.
    Raises:
      ConfigError: no file;
      RequestError: a text that is empty, not UTF-8, or shorter than two windows.
      OSError: a file cannot be read.
    """
    if not paths:
        raise ConfigError(
            "train_text names no file, expected files with commas between"
        )
    ids: list[int] = []
    sha256, window = hashlib.sha256(), settings.window
    tokenizer = load_tokenizer(reader)
    for path in paths:
        text = read_plain_text(path)
        sha256.update(text.encode("utf-8"))
        ids += tokenizer.encode(text)
    kept = max(0, len(ids) - max(window + 1, int(len(ids) * HELD_OUT)))
    train_NS, held_out_NS = cut(ids[:kept], window), cut(ids[kept:], window)
    if not (len(train_NS) and len(held_out_NS)):
        raise RequestError(
            f"training text {','.join(paths)} has {len(ids)} tokens, expected more "
            f"than two windows of {window}, since one is held out; give a longer text "
            "or a smaller window"
        )
    rows = min(settings.held_out_rows, len(held_out_NS))
    picked = np.linspace(0, len(held_out_NS) - 1, rows).astype(int)
    return Windows(train_NS, held_out_NS[picked], sha256.hexdigest())
