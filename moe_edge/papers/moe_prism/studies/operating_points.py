"""Operating points of an elastic model: the K that buy something (MoE-Prism, 6.3.2).

A set of K of which any two differ in measured time, and the slower one is better in
perplexity. What counts as a difference was fixed before the measurement, so that more
rounds do not find more points; whether rounds were enough to see it is a check. All
cases of a round run the same prompts in turn, so two are compared round by round.
"""

import dataclasses
import json
from collections.abc import Mapping

import numpy as np

LEAST = 0.01  # relative: times closer than that are one point
ERRORS = 2.0  # standard errors that should be less
GAIN = 5e-4  # relative: perplexities closer than that are the same

Curve = Mapping[int, tuple[float, float]]  # K -> (seconds, perplexity)


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of a decode step by (model, K, batch), one a round.

    Attributes:
      step_s: lists of at least two, all of the same rounds.
      perplexity: by (model, K).
    """

    step_s: Mapping[tuple[str, int, int], list[float]]
    perplexity: Mapping[tuple[str, int], float] = dataclasses.field(
        default_factory=dict
    )

    @property
    def models(self) -> list[str]:
        """Their names."""
        return list(dict.fromkeys(model for model, _, _ in self.step_s))

    def seconds(self, model: str, k: int, batch: int) -> float:
        """Geometric mean of the rounds."""
        return float(np.exp(np.mean(np.log(self.step_s[model, k, batch]))))

    def ks(self, model: str, batch: int) -> list[int]:
        """The K that were measured, ascending."""
        return sorted(k for m, k, b in self.step_s if (m, b) == (model, batch))

    def curve(self, model: str, batch: int) -> Curve:
        """By rising K."""
        return {
            k: (self.seconds(model, k, batch), self.perplexity[model, k])
            for k in self.ks(model, batch)
        }

    def error(self, batch: int) -> float:
        """Standard error of the relative difference of two neighbouring K.

        The median over all pairs of neighbours, each from its rounds' log ratios.
        """
        found = []
        for model in self.models:
            ks = self.ks(model, batch)
            for low, high in zip(ks, ks[1:], strict=False):
                times = [self.step_s[model, k, batch] for k in (low, high)]
                ratio_R = np.diff(np.log(times), axis=0)[0]
                found.append(np.std(ratio_R, ddof=1) / np.sqrt(len(ratio_R)))
        return float(np.median(found))

    def to_json(self) -> str:
        rows = [
            {"model": m, "k": k, "batch": b, "step_s": times}
            for (m, k, b), times in self.step_s.items()
        ]
        return json.dumps(rows, indent=1) + "\n"


def operating_points(
    curve: Curve, distinct: float = LEAST, gain: float = GAIN
) -> list[int]:
    """The K that count, fastest first: each slower and better than the one before.

    Args:
      distinct: relative difference of times.
      gain: relative difference of perplexities.
    """
    kept: list[int] = []
    for k, (step_s, perplexity) in sorted(curve.items(), key=lambda item: item[1]):
        if kept:
            last_s, last = curve[kept[-1]]
            if step_s <= last_s * (1 + distinct) or perplexity >= last * (1 - gain):
                continue
        kept.append(k)
    return kept
