"""The figures that serving is judged by."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.schedule.request import Request


def summarise(
    served: Sequence[Request],
    *,
    slo_ttft_s: float = 0.5,
    slo_tpot_s: float = 0.02,
) -> dict[str, Any]:
    """The figures of a run, as `moe-edge load` prints them.

    Rates are over the time from the first arrival to the last token. Times are of
    finished requests; `slo_attainment` is the part of all offered requests that
    finished with both times within their limits.
    """
    finished = [one for one in served if one.state == "finished" and one.made]
    tpots = [one.tpot_s for one in finished if one.tpot_s is not None]
    good = sum(
        one.ttft_s <= slo_ttft_s and (one.tpot_s or 0.0) <= slo_tpot_s
        for one in finished
    )
    tokens = sum(one.made for one in served)
    last_s = max((one.last_s or 0.0 for one in served if one.made), default=0.0)
    seconds = last_s - min((one.arrival_s for one in served), default=0.0)
    return {
        "requests": len(served),
        "outcomes": dict(sorted(Counter(one.state for one in served).items())),
        "throughput_req_s": len(finished) / seconds if finished else 0.0,
        "output_tokens_per_s": tokens / seconds if tokens else 0.0,
        "ttft_ms": _spread([one.ttft_s for one in finished]),
        "tpot_ms": _spread(tpots),
        "e2e_ms": _spread([one.e2e_s for one in finished]),
        "slo_attainment": good / len(served) if served else None,
        "floor_violations": sum(
            one.k_least is not None and one.k_least < (one.floor or 0) for one in served
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
