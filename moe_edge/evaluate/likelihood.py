"""Log-probabilities of given tokens, batch by batch and chunk by chunk.

The log-softmax and the pick of the target run on the device, so that only `[B, C]`
numbers reach the host and never more than one chunk of logits exists.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.interrupts import held_interrupts
from moe_edge.core.progress import counter
from moe_edge.engine.session import PREFILL_CHUNK
from moe_edge.model.config import ModelConfig
from moe_edge.model.sampling import likeliest

LOGITS_BYTES = 128 << 20  # bound on one chunk of logits


@dataclasses.dataclass(frozen=True)
class Forced:
    """Tokens of one row; those from `first` (>= 1) on are scored."""

    ids: Sequence[int]
    first: int


@jax.jit
def score_logits(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every target, and the likeliest token in its place.

    Args:
      logits: `[..., V]`; targets: int32 `[...]`.
    """
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1), likeliest(logits)


def pad_rows(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """int32 `[B, length]` of rows that are no longer, filled up with 0."""
    tokens = np.zeros((len(rows), length), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    return tokens


def rows_per_batch(config: ModelConfig, length: int, batch_size: int) -> int:
    """How many rows of `length` tokens run together: bounded by the logits."""
    row_bytes = 4 * config.vocab_size * min(length, PREFILL_CHUNK)
    return max(1, min(batch_size, LOGITS_BYTES // row_bytes))


def token_log_probs(engine, rows: Sequence[Sequence[int]], on_routing=None):
    """Natural log of p(rows[b][i] | rows[b][:i]) at `[b, i]`.

    Args:
      engine: offers `score`.
      rows: token ids, of unequal lengths.
      on_routing: receives the routing of every layer.
    Returns:
      float32 `[B, longest]`; column 0, which has no context, and the padding are 0.
    """
    next_rows = [[*row[1:], 0] for row in rows]
    log_prob_BS, _ = _score_targets(engine, rows, next_rows, on_routing)
    lengths = np.asarray([len(row) for row in rows])
    out = np.roll(log_prob_BS, 1, axis=1)
    column = np.arange(out.shape[1])[None, :]
    return np.where((0 < column) & (column < lengths[:, None]), out, np.float32(0))


@held_interrupts()
def _score_targets(engine, rows, targets, on_routing=None):
    """Log-probability of each target after its row's tokens, and if it is likeliest."""
    longest = max(map(len, rows))
    target_BS = pad_rows(targets, longest)
    log_prob_BS = np.zeros(target_BS.shape, np.float32)
    is_best_BS = np.zeros(target_BS.shape, bool)
    for start, logits_BCV in engine.score(rows, on_routing):
        part = slice(start, start + logits_BCV.shape[1])
        # Logits past the end are unused.
        target_BC = pad_rows(target_BS[:, part], logits_BCV.shape[1])
        scores = score_logits(logits_BCV, jax.device_put(target_BC))
        log_prob_BC, best_BC = map(np.asarray, scores)
        keep = target_BS[:, part].shape[1]
        log_prob_BS[:, part] = log_prob_BC[:, :keep]
        is_best_BS[:, part] = (best_BC == target_BC)[:, :keep]
    return log_prob_BS, is_best_BS


def length_batches(
    config: ModelConfig, lengths: Sequence[int], batch_size: int
) -> Iterator[tuple[list[int], int]]:
    """Which rows run together, longest first: little padding, few shapes.

    Yields:
      (indices of rows, how many rows a batch is filled up to).
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    while order:
        size = rows_per_batch(config, lengths[order[0]], batch_size)
        yield order[:size], size
        order = order[size:]


def score_rows(
    engine, rows: Sequence[Forced], batch_size: int, *, read_last: bool = False
) -> list[tuple[float, bool]]:
    """Per row the summed log-probability of its forced tokens, and if all are greedy.

    Args:
      engine: offers `score` and `config`.
      rows: in any order.
      batch_size: rows run together, fewer if their logits would be too large.
      read_last: the model reads a row's last token too, which nothing follows.
    """
    found: dict[int, tuple[float, bool]] = {}
    lengths = [len(row.ids) for row in rows]
    with counter("choices", len(rows)) as count:
        for batch, size in length_batches(engine.config, lengths, batch_size):
            ids = [list(rows[i].ids) for i in batch]
            inputs = [row if read_last else row[:-1] for row in ids]
            # Rows of one token fill up a batch: same shape, next to no work.
            inputs += [inputs[0][:1]] * (size - len(batch))
            targets = [row[1:] for row in ids] + [[]] * (size - len(batch))
            scores, is_best = _score_targets(engine, inputs, targets)
            for b, i in enumerate(batch):
                part = slice(rows[i].first - 1, lengths[i] - 1)
                total = scores[b, part].astype(np.float64).sum()
                found[i] = float(total), bool(is_best[b, part].all())
            count(len(batch))
    return [found[i] for i in range(len(rows))]
