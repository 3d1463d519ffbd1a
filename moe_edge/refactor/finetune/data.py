"""Text for router fine-tuning: token windows whose order is a function of the step."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import RequestError
from moe_edge.evaluate.plain_text import read_plain_text

HELD_OUT = 0.05  # of the training text, where no other text is given


@dataclasses.dataclass(frozen=True)
class Windows:
    """Tokens cut into windows that overlap by one, so that each is a target once.

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


def read_windows(
    tokenizer: Tokenizer,
    train_text: str,
    held_out_text: str | None,
    *,
    window: int,
    held_out_rows: int,
) -> Windows:
    """Reads and cuts the texts.

    Args:
      tokenizer: of the model.
      train_text: UTF-8 files, separated by commas.
      held_out_text: a file; None: the last `HELD_OUT` of the training text's tokens.
      window: tokens of a window (targets).
      held_out_rows: at most so many held-out windows, spread evenly.
    Raises:
      RequestError: a text that is empty, not UTF-8, or shorter than one window.
      OSError: a file cannot be read.
    """
    ids: list[int] = []
    sha256 = hashlib.sha256()
    for path in train_text.split(","):
        text = read_plain_text(path)
        sha256.update(text.encode("utf-8"))
        ids += tokenizer.encode(text)
    if held_out_text is None:
        kept = max(0, len(ids) - max(window + 1, int(len(ids) * HELD_OUT)))
        ids, held_out = ids[:kept], ids[kept:]
    else:
        held_out = tokenizer.encode(read_plain_text(held_out_text))
    train_NS, held_out_NS = cut(ids, window), cut(held_out, window)
    for name, rows_NS, tokens in (
        (f"training text {train_text}", train_NS, ids),
        (
            f"held-out text {held_out_text or '(end of the training text)'}",
            held_out_NS,
            held_out,
        ),
    ):
        if not len(rows_NS):
            raise RequestError(
                f"{name} has {len(tokens)} tokens, expected more than the window of "
                f"{window}; give a longer text or a smaller --window"
            )
    rows = min(held_out_rows, len(held_out_NS))
    picked = np.linspace(0, len(held_out_NS) - 1, rows).astype(int)
    return Windows(train_NS, held_out_NS[picked], sha256.hexdigest())
