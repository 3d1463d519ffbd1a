"""What a refactored model is worth: its identity error and perplexity at every K."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.model.sub_experts import at_k
from moe_edge.papers.moe_prism.refactor.settings import whole_k

IDENTITY_TOKENS = 128


def measure_model(
    parent: str | Path,
    folder: str | Path,
    ids: Sequence[int],
    ks: Sequence[int],
    seed: int,
) -> dict:
    """Identity error, and perplexity at each K and the parent's at K / U.

    One of the two models is in memory at a time.

    Args:
      parent: checkpoint before.
      folder: refactored checkpoint.
      ids: held-out tokens.
      ks: values of K; none leaves perplexity out.
      seed: of random tokens, where the text is too short for the identity error.
    Returns:
      identity_error (largest difference of logits with all sub-experts on, in standard
      deviations), identity_tokens, ppl_by_k and parent_ppl_by_k, under the K of the
      refactored model that computes as many neurons.
    """
    reader = open_checkpoint(folder)
    config, U = reader.config, reader.config.moe.sub_experts
    count = min(IDENTITY_TOKENS, config.max_positions)
    tokens = list(ids[:count])
    if len(ids) < count:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, config.vocab_size, count).tolist()
    parents = [k // U for k in ks if k % U == 0]
    expected, before = _measure(open_checkpoint(parent), None, tokens, ids, parents)
    got, after = _measure(reader, whole_k(config.moe), tokens, ids, ks)
    return {
        "identity_error": float(np.abs(got - expected).max() / expected.std()),
        "identity_tokens": len(tokens),
        "ppl_by_k": after,
        "parent_ppl_by_k": {k * U: value for k, value in before.items()},
    }


def _measure(reader, k: int | None, tokens, ids, ks) -> tuple[np.ndarray, dict]:
    """Logits of some tokens at one K, and the perplexity of others at every K."""
    weights = load_weights(reader)

    def engine_at(k):
        config = at_k(weights.config, k)
        return ResidentEngine(dataclasses.replace(weights, config=config))

    chunks = [np.asarray(logits)[0] for _, logits in engine_at(k).score([tokens])]
    ppl_by_k = {}
    for k in ks:
        name = f"perplexity at K {k}, batches of windows"
        ppl_by_k[k] = measure_perplexity(engine_at(k), ids, name=name).value
    return np.concatenate(chunks)[: len(tokens)], ppl_by_k
