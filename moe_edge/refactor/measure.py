"""What a refactored model is worth: its identity error and perplexity at every K."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import Weights, load_weights
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.evaluate.texts import find_path, read_text, sha256_of
from moe_edge.model.config import MoeConfig
from moe_edge.model.sub_experts import at_k

HELD_OUT = Path(__file__).resolve().parent.parent / "evaluate/held_out/books.txt"
IDENTITY_TOKENS = 128


def whole_k(moe: MoeConfig) -> int:
    """K at which all sub-experts of the parent's own experts run."""
    return moe.parent_top_k * moe.sub_experts


def parse_ks(text: str, moe: MoeConfig) -> list[int]:
    """Values of K named by a flag.

    Args:
      text: `all` (1 to all sub-experts of the parent's experts), numbers separated by
        commas, or empty.
      moe: of the refactored model.
    Raises:
      ConfigError: no numbers, or outside of what the gate defines.
    """
    if text == "all":
        return list(range(1, whole_k(moe) + 1))
    try:
        ks = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"ppl_k is {text!r}, expected `all` or 4,8,12") from error
    bad = [k for k in ks if not 1 <= k <= moe.max_top_k]
    if bad:
        raise ConfigError(f"ppl_k {bad[0]} is outside of 1..{moe.max_top_k}")
    return sorted(set(ks))


def engine_at(weights: Weights, k: int | None) -> ResidentEngine:
    """An engine for another K on the same weights."""
    config = at_k(weights.config, k)
    return ResidentEngine(dataclasses.replace(weights, config=config))


def _logits(engine, ids) -> np.ndarray:
    chunks = [np.asarray(logits)[0] for _, logits in engine.score([ids])]
    return np.concatenate(chunks)[: len(ids)]


def perplexities(
    weights: Weights, ids: Sequence[int], ks: Sequence[int]
) -> dict[int, float]:
    """Perplexity of a text at every K."""
    return {k: measure_perplexity(engine_at(weights, k), ids).value for k in ks}


def identity_ids(
    ids: Sequence[int], vocab_size: int, max_positions: int, seed: int
) -> list[int]:
    """Tokens for the identity error: the text's first, or random ones."""
    count = min(IDENTITY_TOKENS, max_positions)
    if len(ids) >= count:
        return list(ids[:count])
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


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
      seed: of random tokens.
    Returns:
      identity_error (largest difference of logits with all sub-experts on, in standard
      deviations), identity_tokens, ppl_by_k and parent_ppl_by_k, under the K of the
      refactored model that computes as many neurons.
    """
    reader = open_checkpoint(folder)
    config, U = reader.config, reader.config.moe.sub_experts
    tokens = identity_ids(ids, config.vocab_size, config.max_positions, seed)
    weights = load_weights(open_checkpoint(parent))
    expected = _logits(engine_at(weights, None), tokens)
    before = perplexities(weights, ids, [k // U for k in ks if k % U == 0])
    del weights
    weights = load_weights(reader)
    got = _logits(engine_at(weights, whole_k(config.moe)), tokens)
    return {
        "identity_error": float(np.abs(got - expected).max() / expected.std()),
        "identity_tokens": len(tokens),
        "ppl_by_k": perplexities(weights, ids, ks),
        "parent_ppl_by_k": {k * U: value for k, value in before.items()},
    }


def read_ids(reader, text, data_dir, limit: int) -> tuple[list[int], dict]:
    """Tokens of the held-out text, and its name and hash.

    Raises:
      RequestError: a text without a token that has one before it.
    """
    path = str(HELD_OUT) if text is None else find_path(text, data_dir)
    content = read_text(path)
    # A token has at least one character; most have three.
    ids = load_tokenizer(reader).encode(content[: 16 * limit])[:limit]
    if len(ids) < 2:
        raise RequestError(
            f"{path} has {len(ids)} tokens read, expected at least 2, since the first "
            "is never scored; give a longer --text or --max_text_tokens"
        )
    return ids, {"path": path, "sha256": sha256_of(path), "tokens": len(ids)}
