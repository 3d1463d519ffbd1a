"""Which weight rule of substitution stays closest to the model, by measurement.

Perplexity may fall by chance or because a blunter mixture suits a text; closeness is
how far the log-probability of each token moves, up or down.
"""

from typing import Any

import numpy as np

from moe_edge.evaluate.agreement import bootstrap_mean, lost_nats
from moe_edge.evaluate.stepwise import ForcedRun


def rule_of(found: dict[str, Any]) -> str:
    """The weight rule of a substitution's card."""
    return found["weights"] + (", renormalised" if found["renormalise"] else "")


class RuleTally:
    """Adds up rules over settings (a, budget, batch), all on the same tokens."""

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
