"""Perplexity of a long text by sliding windows.

Windows are [b, b + window) for b = 0, stride, 2 * stride, ... up to the first that
reaches the end. In each, only tokens that no earlier window scored count, and a
window's first token is never scored, for it has no context. With a stride of half
the window every token but those of the first window has at least window - stride
tokens of context.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError, RequestError
from moe_edge.core.progress import progress
from moe_edge.evaluate.likelihood import rows_per_batch, token_log_probs

DEFAULT_WINDOW = 512


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens [start, end) are read, [scored, end) are scored."""

    start: int
    scored: int
    end: int


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Result of a measurement.

    Attributes:
      nll: negative log-likelihood of all scored tokens, in nats.
      tokens: scored tokens.
      window: tokens a window.
      stride: tokens between windows.
      nats: of every scored token, float64, window by window.
    """

    nll: float
    tokens: int
    window: int
    stride: int
    nats: tuple[np.ndarray, ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )

    @property
    def value(self) -> float:
        """exp of the mean negative log-likelihood; infinite beyond float64."""
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 700 else math.inf


def plan_windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Windows over a text.

    Raises:
      ConfigError: a window below 2 tokens, or a stride outside 1..window.
      RequestError: a text of fewer than 2 tokens.
    """
    if window < 2:
        raise ConfigError(f"window must be at least 2 tokens, got {window}")
    if not 1 <= stride <= window:
        raise ConfigError(
            f"stride must lie in 1..window={window}, got {stride}: a longer one would "
            "skip tokens"
        )
    if num_tokens < 2:
        raise RequestError(
            f"the text has {num_tokens} tokens; expected at least 2, since the first "
            "is never scored"
        )
    windows, scored = [], 0
    for start in range(0, num_tokens, stride):
        end = min(start + window, num_tokens)
        first = max(scored, start + 1)
        if first < end:
            windows.append(Window(start, first, end))
        scored = end
        if end == num_tokens:
            break
    return windows


def default_window(max_positions: int) -> int:
    """The smaller of 512 tokens and the model's context."""
    return min(DEFAULT_WINDOW, max_positions)


def measure_perplexity(
    engine,
    ids: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    on_routing=None,
    name: str = "batches of windows",
) -> Perplexity:
    """Perplexity of a model on one token sequence.

    Args:
      engine: offers `score` and `config`.
      ids: the text's tokens.
      window: default `default_window`.
      stride: default half the window.
      batch_size: windows run together (fewer if their logits would be too large).
      on_routing: receives the routing of every layer.
      name: what progress lines call it.
    Raises:
      CapacityError: a window longer than the model's context.
      ConfigError, RequestError: see `plan_windows`.
    """
    limit = engine.config.max_positions
    window = default_window(limit) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if window > limit:
        raise CapacityError(
            f"window of {window} tokens exceeds the model's context of "
            f"{engine.config.context_words}"
        )
    # The last window is the short one; first in line, it shares a batch, and so a
    # compiled shape, with full ones.
    windows = plan_windows(len(ids), window, stride)[::-1]
    size = rows_per_batch(engine.config, min(window, len(ids)), batch_size)
    size = min(size, len(windows))
    nll, tokens, nats = 0.0, 0, []
    steps = range(0, len(windows), size)
    for first in progress(steps, name):
        batch = windows[first : first + size]
        rows = [ids[part.start : part.end] for part in batch]
        # Rows of one token fill up the last batch: same shape, next to no work.
        rows += [ids[:1]] * (size - len(rows))
        callback = on_routing and functools.partial(
            _real_rows, on_routing, len(batch), len(rows)
        )
        scores = token_log_probs(engine, rows, callback).astype("float64")
        for row, part in enumerate(batch):
            kept = scores[row, part.scored - part.start : part.end - part.start]
            nll -= float(kept.sum())
            tokens += kept.size
            nats.append(-kept)
    return Perplexity(nll, tokens, window, stride, tuple(nats[::-1]))


def _real_rows(on_routing, real: int, rows: int, layer: int, routing) -> None:
    """Hides the rows that only fill up a batch from a routing callback."""
    if real < rows:
        tokens = routing.ids_TK.shape[0] // rows * real
        routing = type(routing)(*(array[:tokens] for array in routing))
    on_routing(layer, routing)
