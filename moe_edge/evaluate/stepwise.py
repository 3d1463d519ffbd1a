"""Teacher-forced scoring by decode steps, the only place where a lossy route acts.

Prefill computes what the model's own router chose, so the fidelity of a lossy mode
shows only when every scored token is predicted by a decode step. On a lossless engine
the scores are those of prefill up to rounding.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from moe_edge.core.checks import RequestError
from moe_edge.core.interrupts import check_interrupt, held_interrupts
from moe_edge.core.progress import progress
from moe_edge.engine.session import check_prompts
from moe_edge.evaluate.likelihood import Forced, pad_rows, score_logits


@dataclasses.dataclass
class ForcedRun:
    """Scores of the forced tokens, and what their decode steps cost.

    Attributes:
      log_probs: per row, float32 `[N]`, natural log of p(token) of `ids[first:]`.
      best: per row, int32 `[N]`, the likeliest token in its place.
      steps: decode steps.
      step_s: mean seconds of one, of each batch of rows.
      bytes_moved: by them, to the device.
    """

    log_probs: list[np.ndarray]
    best: list[np.ndarray]
    steps: int
    step_s: list[float]
    bytes_moved: int


@held_interrupts()
def score_forced(
    engine, rows: Sequence[Forced], *, capacity: int | None = None
) -> ForcedRun:
    """Scores forced tokens of several rows that decode together.

    All scored tokens are predicted by decode steps, but for a row's token 1, which
    has nothing to decode before it. The rows end together: one with fewer forced
    tokens than another decodes the end of its prompt too, so that the session never
    needs more room than the longest row.

    Args:
      engine: any engine.
      rows: may differ in length; one without forced tokens only fills up the batch.
      capacity: of the session (None: the longest row); a common one for several
        calls saves compilation.
    Raises:
      RequestError: a row without a prompt, or a token outside the vocabulary.
      CapacityError: a row longer than the model's context.
    """
    lengths = check_prompts([row.ids for row in rows], engine.config.vocab_size)
    for number, row in enumerate(rows):
        if row.first < 1:
            raise RequestError(
                f"row {number} forces tokens from {row.first} on; expected 1 or more: "
                "the first token has no context"
            )
    # Decode steps, and where each row's begin.
    asked = [n - max(1, row.first - 1) for n, row in zip(lengths, rows, strict=True)]
    count = max(1, *asked)
    starts = [max(1, length - count) for length in lengths]
    target_NB = np.zeros((count, len(rows)), np.int32)
    is_real_NB = np.zeros((count, len(rows)), bool)
    for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
        target_NB[: lengths[b] - start, b] = row.ids[start:]
        is_real_NB[: lengths[b] - start, b] = True

    session = engine.new_session(len(rows), max(capacity or 0, *lengths))
    prompts = [row.ids[:start] for row, start in zip(rows, starts, strict=True)]
    logits = engine.prefill(session, prompts)
    scores = [score_logits(logits, jax.device_put(target_NB[0]))]
    jax.block_until_ready(scores)
    moved = engine.movement()["bytes_moved"]
    started_s = time.perf_counter()
    for n in range(1, count):
        check_interrupt()
        tokens_B, active_B = jax.device_put((target_NB[n - 1], is_real_NB[n]))
        logits = engine.decode(session, tokens_B, active_B)
        scores.append(score_logits(logits, jax.device_put(target_NB[n])))
    jax.block_until_ready(scores)
    decode_s = time.perf_counter() - started_s
    moved = engine.movement()["bytes_moved"] - moved

    log_prob_NB = np.stack([np.asarray(pair[0]) for pair in scores])
    best_NB = np.stack([np.asarray(pair[1]) for pair in scores])
    kept = [
        slice(max(0, row.first - start), length - start)
        for row, start, length in zip(rows, starts, lengths, strict=True)
    ]
    return ForcedRun(
        [log_prob_NB[part, b] for b, part in enumerate(kept)],
        [best_NB[part, b] for b, part in enumerate(kept)],
        count - 1,
        [decode_s / max(1, count - 1)],
        moved,
    )


def score_batches(engine, rows: Sequence[Forced], batch_size: int) -> ForcedRun:
    """`score_forced` of all rows, `batch_size` at a time, in their order.

    The last batch is filled up with rows of one token: same shape, no decode work.
    """
    (run,) = score_in_turn([engine], rows, batch_size)
    return run


def score_in_turn(
    engines: Sequence, rows: Sequence[Forced], batch_size: int
) -> list[ForcedRun]:
    """`score_batches` by several engines: all take a batch before any takes the next,
    every second time in reverse order, so that their times compare."""
    capacity = max((len(row.ids) for row in rows), default=0)
    totals = [ForcedRun([], [], 0, [], 0) for _ in engines]
    pairs = [*zip(engines, totals, strict=True)]
    starts = range(0, len(rows), batch_size)
    for start in progress(starts, "forced batches"):
        batch = list(rows[start : start + batch_size])
        real = len(batch)
        batch += [Forced(batch[0].ids[:1], 1)] * (batch_size - real)
        for engine, total in pairs:
            run = score_forced(engine, batch, capacity=capacity)
            total.log_probs += run.log_probs[:real]
            total.best += run.best[:real]
            total.steps += run.steps
            total.step_s += run.step_s
            total.bytes_moved += run.bytes_moved
        pairs.reverse()
    return totals


def step_continuations(engine, items: Sequence[Forced], batch_size: int) -> np.ndarray:
    """As `multiple_choice.score_continuations`, but each choice by decode steps."""
    order = sorted(range(len(items)), key=lambda i: len(items[i].ids), reverse=True)
    run = score_batches(engine, [items[i] for i in order], batch_size)
    sums = np.zeros(len(items))
    sums[order] = [row.sum(dtype=np.float64) for row in run.log_probs]
    return sums


class Stepwise:
    """An engine whose `score` runs every token but a row's first by decode steps.

    Perplexity and logits of a lossy engine are measured through it.
    """

    def __init__(self, engine):
        self._engine, self.config = engine, engine.config

    def score(self, prompts, on_routing=None):
        """As `Engine.score`, in chunks of one position."""
        engine = self._engine
        length_B = np.asarray(check_prompts(prompts, self.config.vocab_size))
        longest = int(length_B.max())
        tokens_BS = pad_rows(prompts, longest)
        session = engine.new_session(len(prompts), longest)
        logits = engine.prefill(session, tokens_BS[:, :1].tolist(), on_routing)
        yield 0, logits[:, None]
        for i in range(1, longest):
            check_interrupt()
            tokens_B, active_B = jax.device_put((tokens_BS[:, i].copy(), i < length_B))
            logits = engine.decode(session, tokens_B, active_B, on_routing)
            yield i, logits[:, None]
