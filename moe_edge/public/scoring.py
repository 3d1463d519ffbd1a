"""What a model says of a text that is there: logits and perplexity."""

from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.core.interrupts import held_interrupts
from moe_edge.engine.base import Engine
from moe_edge.evaluate.perplexity import default_window, measure_perplexity
from moe_edge.evaluate.stepwise import Stepwise


def _scorer(core: Engine) -> Engine | Stepwise:
    """The engine; one whose route is lossy, by the decode steps in which it acts."""
    return core if core.lossless else Stepwise(core)


def score_logits(core: Engine, ids: Sequence[int]) -> np.ndarray:
    """Logits after each token, float32 `[T, V]`."""
    with held_interrupts():
        scored = _scorer(core).score([ids])
        parts = [np.asarray(logits)[0] for _, logits in scored]
    return np.concatenate(parts)[: len(ids)]


def score_perplexity(
    core: Engine,
    ids: Sequence[int],
    window: int | None,
    stride: int | None,
    context: int,
    batch_size: int,
) -> float:
    """Perplexity by sliding windows.

    Args:
      window, stride: tokens; None: 512 or the context, and half a window.
      context: the most tokens of a window.
      batch_size: windows that run together.
    """
    for name, value in {"window": window, "stride": stride}.items():
        if value is not None:
            check_count(name, value)
    window = default_window(context) if window is None else window
    return measure_perplexity(
        _scorer(core), ids, window=window, stride=stride, batch_size=batch_size
    ).value
