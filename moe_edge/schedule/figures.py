"""What became of requests for tokens, and the figures that serving is judged by."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(slots=True)
class Served:
    """What became of a request.

    Attributes:
      arrival_s: when it came; floor: fewest experts a token that it asked for.
      admitted_s: when its first step began; first_s, last_s: when its first and last
        token were there; None: never.
      tokens: new ones.
      k_sum: of the K of each of them; k_least, k_most: the smallest, the largest.
      outcome: how it ended.
    """

    arrival_s: float
    floor: int = 0
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    k_sum: int = 0
    k_least: int | None = None
    k_most: int | None = None
    outcome: str = ""

    def add(self, time_s: float, k: int) -> None:
        """A token is there."""
        self.first_s = time_s if self.first_s is None else self.first_s
        self.last_s, self.tokens = time_s, self.tokens + 1
        self.k_sum += k
        self.k_least = k if self.k_least is None else min(k, self.k_least)
        self.k_most = k if self.k_most is None else max(k, self.k_most)

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Of each token after the first; None if there is none."""
        if self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


def summarise(
    served: Sequence[Served],
    *,
    slo_ttft_s: float = 0.5,
    slo_tpot_s: float = 0.02,
) -> dict[str, Any]:
    """The figures of a run, as `moe-edge load` prints them.

    Rates are over the time from the first arrival to the last token. Times are of
    finished requests; `slo_attainment` is the part of all offered requests that
    finished with both times within their limits.
    """
    finished = [one for one in served if one.outcome == "finished" and one.tokens]
    tpots = [one.tpot_s for one in finished if one.tpot_s is not None]
    good = sum(
        one.ttft_s <= slo_ttft_s and (one.tpot_s or 0.0) <= slo_tpot_s
        for one in finished
    )
    tokens = sum(one.tokens for one in served)
    last_s = max((one.last_s for one in served if one.tokens), default=0.0)
    seconds = last_s - min((one.arrival_s for one in served), default=0.0)
    return {
        "requests": len(served),
        "outcomes": dict(sorted(Counter(one.outcome for one in served).items())),
        "throughput_req_s": len(finished) / seconds if finished else 0.0,
        "output_tokens_per_s": tokens / seconds if tokens else 0.0,
        "ttft_ms": _spread([one.ttft_s for one in finished]),
        "tpot_ms": _spread(tpots),
        "e2e_ms": _spread([one.last_s - one.arrival_s for one in finished]),
        "slo_attainment": good / len(served) if served else None,
        "floor_violations": sum(
            one.k_least is not None and one.k_least < one.floor for one in served
        ),
        "mean_k": sum(one.k_sum for one in served) / tokens if tokens else None,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds."""
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    values = {"mean": float(np.mean(seconds)), "p50": p50, "p95": p95, "p99": p99}
    return {name: 1e3 * value for name, value in values.items()}
