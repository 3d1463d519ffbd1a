"""How far a run's predictions are from a reference's on the same forced tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.multiple_choice import wilson_interval
from moe_edge.evaluate.stepwise import ForcedRun

BLOCK = 32  # consecutive tokens that are drawn together: neighbours are not independent
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Agreement:
    """A run against its reference.

    Attributes:
      tokens: compared.
      agreement: share whose likeliest token is the same, and its 95 % interval
        (Wilson, tokens taken as independent).
      perplexity_ratio: run over reference, and its 95 % interval (block bootstrap of
        the paired differences).
      perplexity: of the run.
      moved_nats: mean |change| of a token's log-probability, gains counted as losses.
    """

    tokens: int
    agreement: float
    agreement_interval95: tuple[float, float]
    perplexity_ratio: float
    ratio_interval95: tuple[float, float]
    perplexity: float
    moved_nats: float


# Of an `Agreement`: measure -> its interval.
INTERVALS = {
    "agreement": "agreement_interval95",
    "perplexity_ratio": "ratio_interval95",
}


def compare(run: ForcedRun, reference: ForcedRun, seed: int = 0) -> Agreement:
    """Agreement of a run with its reference, token by token.

    Raises:
      ConfigError: they did not score the same rows, or scored nothing.
    """
    lengths = [len(row) for row in run.log_probs]
    expected = [len(row) for row in reference.log_probs]
    if lengths != expected or sum(lengths) == 0:
        raise ConfigError(
            f"rows of {lengths} scored tokens cannot be compared with {expected}; "
            "score the same rows, of at least one token"
        )
    same = np.concatenate(run.best) == np.concatenate(reference.best)
    lost = lost_nats(run.log_probs, reference.log_probs)
    nats = -np.concatenate(run.log_probs).mean(dtype=np.float64)
    return Agreement(
        tokens=same.size,
        agreement=float(same.mean()),
        agreement_interval95=wilson_interval(int(same.sum()), same.size),
        perplexity_ratio=float(np.exp(np.concatenate(lost).mean())),
        ratio_interval95=bootstrap_ratio(lost, seed),
        perplexity=float(np.exp(nats)),
        moved_nats=float(np.abs(np.concatenate(lost)).mean()),
    )


def lost_nats(log_probs, reference_log_probs) -> list[np.ndarray]:
    """Nats lost by each token of each row, float64."""
    pairs = zip(log_probs, reference_log_probs, strict=True)
    return [old.astype(np.float64) - new.astype(np.float64) for new, old in pairs]


def bootstrap_ratio(lost: Sequence[np.ndarray], seed: int = 0) -> tuple[float, float]:
    """95 % interval of exp(mean nats lost); arguments as of `bootstrap_mean`."""
    low, high = np.exp(bootstrap_mean(lost, seed))
    return float(low), float(high)


def bootstrap_mean(rows: Sequence[np.ndarray], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over all tokens, from resampled blocks of them.

    Args:
      rows: one number a token; blocks do not cross rows.
      seed: of the resampling.
    """
    blocks = [row[i : i + BLOCK] for row in rows for i in range(0, len(row), BLOCK)]
    sum_N = np.asarray([block.sum() for block in blocks])
    size_N = np.asarray([block.size for block in blocks])
    drawn_RN = np.random.default_rng(seed).integers(
        0, len(blocks), (RESAMPLES, len(blocks))
    )
    mean_R = sum_N[drawn_RN].sum(axis=1) / size_N[drawn_RN].sum(axis=1)
    low, high = np.quantile(mean_R, (0.025, 0.975))
    return float(low), float(high)


def rule_of(found: dict[str, Any]) -> str:
    """The weight rule of a substitution's card."""
    return found["weights"] + (", renormalised" if found["renormalise"] else "")


class RuleTally:
    """Which weight rule of substitution stays closest to the model, by measurement.

    Perplexity may fall by chance or because a blunter mixture suits a text; closeness
    is how far the log-probability of each token moves, up or down. Adds up rules over
    settings (a, budget, batch), all on the same tokens.
    """

    def __init__(self):
        self._moved: dict[str, list[list[np.ndarray]]] = {}
        self._cards: dict[str, list[dict[str, Any]]] = {}

    def add(self, found: dict[str, Any], run: ForcedRun, reference: ForcedRun) -> None:
        """Adds a setting: its card, and the runs behind it."""
        lost = lost_nats(run.log_probs, reference.log_probs)
        rule = rule_of(found)
        self._moved.setdefault(rule, []).append([np.abs(row) for row in lost])
        self._cards.setdefault(rule, []).append(found)

    def verdict(self, seed: int = 0) -> dict[str, Any] | None:
        """The closest rule, and whether the second is farther beyond chance.

        Returns:
          `best`, `clear`, the interval of the difference to the second, and per rule
          (closest first) the means over settings; None if nothing was added.
        """
        if not self._moved:
            return None
        mean = {
            rule: [np.mean(rows, axis=0) for rows in zip(*settings, strict=True)]
            for rule, settings in self._moved.items()
        }
        moved = {rule: np.concatenate(rows).mean() for rule, rows in mean.items()}
        order = sorted(moved, key=moved.get)
        rules = {
            rule: {
                "moved_nats": float(moved[rule]),
                "agreement": float(np.mean([c["agreement"] for c in cards])),
                "perplexity_ratio": float(
                    np.exp(np.mean([np.log(c["perplexity_ratio"]) for c in cards]))
                ),
                "settings": len(cards),
            }
            for rule in order
            for cards in [self._cards[rule]]
        }
        verdict = {"best": order[0], "rules": rules, "clear": False}
        if len(order) > 1:
            pairs = zip(mean[order[1]], mean[order[0]], strict=True)
            interval = bootstrap_mean([worse - best for worse, best in pairs], seed)
            verdict["second_minus_best_interval95"] = list(interval)
            verdict["clear"] = interval[0] > 0
        return verdict
