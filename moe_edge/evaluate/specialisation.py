"""Is a model a real mixture? Expert usage by domain, and the loss with fewer experts.

Usage that differs between domains much more than between two texts of one domain
shows that the router specialises; a loss with half the experts shows that the
experts compute something.
"""

import dataclasses

import numpy as np

from moe_edge.engine.load import Loaded
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


class DomainScorer:
    """Scores texts of one domain after the other; programs are compiled once."""

    def __init__(self, loaded: Loaded, batch_size: int = 8):
        self.full, self.tokenizer = loaded.engine, loaded.tokenizer
        config = self.full.config
        self.half = self.full.at_k(max(1, config.moe.top_k // 2))
        window = min(WINDOW, config.max_positions)
        # Windows that do not overlap: each token is routed, and counted, once.
        self._options = {"window": window, "stride": window, "batch_size": batch_size}

    def score(self, texts: tuple[str, ...]) -> DomainScore:
        """Loss and expert usage of different texts of one domain."""
        counts, tokens, nll, nll_half = [], 0, 0.0, 0.0
        for text in texts:
            ids = self.tokenizer.encode(text, end=False)
            counter = UsageCounter(self.full.config)
            result = measure_perplexity(
                self.full, ids, on_routing=counter, **self._options
            )
            counts.append(counter.counts_LE)
            tokens, nll = tokens + result.tokens, nll + result.nll
            nll_half += measure_perplexity(self.half, ids, **self._options).nll
        return DomainScore(tokens, nll, nll_half, np.stack(counts))
