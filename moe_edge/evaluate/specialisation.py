"""Is a model a real mixture? Expert usage by domain, and the loss with fewer experts.

Usage that differs between domains much more than between two texts of one domain
shows that the router specialises; a loss with half the experts shows that the
experts compute something.
"""

import dataclasses

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.engine.load import Loaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.evaluate.usage import UsageCounter

WINDOW = 256


@dataclasses.dataclass(frozen=True)
class DomainScore:
    """Held-out loss of one domain with all and with half of the chosen experts.

    Attributes:
      tokens: scored tokens.
      nll: nats over all of them; `nll_half` with half the experts a token.
      counts_PLE: expert choices in each of the domain's texts.
    """

    tokens: int
    nll: float
    nll_half: float
    counts_PLE: np.ndarray

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / self.tokens))

    @property
    def lost_ratio(self) -> float:
        """Perplexity lost with half the experts."""
        return float(np.expm1((self.nll_half - self.nll) / self.tokens))


def with_top_k(engine: ResidentEngine, top_k: int) -> ResidentEngine:
    """The same weights, running `top_k` experts a token."""
    config = engine.config
    moe = dataclasses.replace(config.moe, top_k=top_k)
    config = dataclasses.replace(config, moe=moe)
    return ResidentEngine(dataclasses.replace(engine.weights, config=config))


class DomainScorer:
    """Scores texts of one domain after the other; programs are compiled once."""

    def __init__(self, loaded: Loaded, batch_size: int = 8):
        self.full, self.tokenizer = loaded.engine, loaded.tokenizer
        config = self.full.config
        self.half = with_top_k(self.full, max(1, config.moe.top_k // 2))
        window = min(WINDOW, config.max_positions)
        # Windows that do not overlap: each token is routed, and counted, once.
        self._options = {"window": window, "stride": window, "batch_size": batch_size}

    def score(self, texts: tuple[str, ...]) -> DomainScore:
        """Loss and expert usage of different texts of one domain."""
        counts, tokens, nll, nll_half = [], 0, 0.0, 0.0
        for text in texts:
            ids = self.tokenizer.encode(text)
            counter = UsageCounter(self.full.config)
            result = measure_perplexity(
                self.full, ids, on_routing=counter, **self._options
            )
            counts.append(counter.counts_LE)
            tokens, nll = tokens + result.tokens, nll + result.nll
            nll_half += measure_perplexity(self.half, ids, **self._options).nll
        return DomainScore(tokens, nll, nll_half, np.stack(counts))


def usage_distances(counts_NPLE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Total variation distances of expert usage per layer: (domains, control).

    Both compare a first with a second text of equal size: of two different domains,
    averaged over ordered pairs, and of one domain.

    Args:
      counts_NPLE: choices in P = 2 texts of each of N domains.
    Raises:
      ConfigError: fewer than two domains, or not two texts each.
    """
    N, P = counts_NPLE.shape[:2]
    if N < 2 or P != 2:
        raise ConfigError(f"usage needs two texts of two domains, got {P} of {N}")
    shares = counts_NPLE / np.maximum(counts_NPLE.sum(-1, keepdims=True), 1)
    first_N1LE, second_1NLE = shares[:, None, 0], shares[None, :, 1]
    distance_NNL = 0.5 * np.abs(first_N1LE - second_1NLE).sum(-1)
    same = np.eye(N, dtype=bool)
    return distance_NNL[~same].mean(axis=0), distance_NNL[same].mean(axis=0)
