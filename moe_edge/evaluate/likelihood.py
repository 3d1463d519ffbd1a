"""Log-probabilities of given tokens, batch by batch and chunk by chunk.

The log-softmax and the pick of the target run on the device, so that only `[B, C]`
numbers reach the host and never more than one chunk of logits exists.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.engine.session import PREFILL_CHUNK
from moe_edge.model.config import ModelConfig

LOGITS_BYTES = 128 << 20  # bound on one chunk of logits


@jax.jit
def _target_log_probs(logits_BCV: jax.Array, targets_BC: jax.Array) -> jax.Array:
    picked_BC1 = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)
    return picked_BC1[..., 0] - jax.nn.logsumexp(logits_BCV, axis=-1)


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
    lengths = np.asarray([len(row) for row in rows])
    longest = int(lengths.max())
    tokens = np.zeros((len(rows), longest), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    out = np.zeros((len(rows), longest + 1), np.float32)
    for start, logits in engine.score(rows, on_routing):
        size = logits.shape[1]
        # The logits at position i predict token i + 1; those past the end are unused.
        targets = np.zeros((len(rows), size), np.int32)
        next_tokens = tokens[:, start + 1 : start + 1 + size]
        targets[:, : next_tokens.shape[1]] = next_tokens
        picked = _target_log_probs(logits, jax.device_put(targets))
        keep = min(size, longest - start)
        out[:, start + 1 : start + 1 + keep] = np.asarray(picked)[:, :keep]
    out = out[:, :longest]
    out[np.arange(longest)[None, :] >= lengths[:, None]] = 0.0
    return out
