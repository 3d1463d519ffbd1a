"""Which of the estimated configurations is taken, and by how much others lose."""

import dataclasses
import math
from collections.abc import Sequence

from moe_edge.offload.budget import parse_budget
from moe_edge.planner.candidates import Candidate
from moe_edge.planner.estimate import Estimate
from moe_edge.planner.options import PlanOptions

KEYS = {
    "tpot": "tpot_s",
    "ttft": "ttft_s",
    "memory": "device_bytes",
    "quality": "ppl_ratio",
}


@dataclasses.dataclass(frozen=True)
class Judged:
    """A candidate, what it would take, and by what share it misses each target."""

    candidate: Candidate
    estimate: Estimate
    missed: dict[str, float]

    @property
    def feasible(self) -> bool:
        return not self.missed

    def middle(self, key: str) -> float:
        found = getattr(self.estimate, key)
        return float("inf") if found is None else found[1]


def judge(candidate: Candidate, estimate: Estimate, asked: PlanOptions) -> Judged:
    """Compares an estimate with the targets, by its middle."""
    limits = {
        "tpot_s": asked.tpot_ms and asked.tpot_ms / 1e3,
        "ttft_s": asked.ttft_ms and asked.ttft_ms / 1e3,
        "ppl_ratio": asked.max_ppl_ratio,
        "host_bytes": asked.host_memory and parse_budget(asked.host_memory).bytes,
    }
    missed = {}
    for key, limit in limits.items():
        found = getattr(estimate, key)
        if limit is None:
            continue
        if found is None or found[1] > limit:
            missed[key] = float("inf") if found is None else found[1] / limit - 1
    if (least := asked.min_agreement) is not None:
        found = estimate.agreement
        if found is None or found[1] < least:
            missed["agreement"] = (
                float("inf") if found is None else 1 - found[1] / least
            )
    return Judged(candidate, estimate, missed)


def ranked(judged: Sequence[Judged], asked: PlanOptions) -> list[Judged]:
    """All, the chosen one first: those that meet the targets by the objective, then
    the others by what they miss most.

    Of those within the margin of the best, the first is the one that changes least:
    fidelity, then options.
    """
    key = KEYS[asked.objective]
    good = sorted((one for one in judged if one.feasible), key=lambda j: _order(j, key))
    bad = [one for one in judged if not one.feasible]
    bad.sort(key=lambda one: (max(one.missed.values()), one.middle("tpot_s")))
    if not good:
        return bad
    best = good[0].middle(key)
    near = [one for one in good if one.middle(key) <= best * (1 + asked.margin_share)]
    first = min(
        near,
        key=lambda j: (j.middle("ppl_ratio"), len(j.candidate.changes), _order(j, key)),
    )
    return [first, *(one for one in good if one is not first), *bad]


def _order(judged: Judged, key: str) -> tuple[float, ...]:
    return judged.middle(key), judged.middle("tpot_s"), len(judged.candidate.changes)


def loses_by(other: Judged, chosen: Judged) -> dict[str, float]:
    """Shares by which a candidate is worse than the chosen one, by key."""
    found = {}
    for key in KEYS.values():
        ours, theirs = chosen.middle(key), other.middle(key)
        if math.inf > theirs > ours > 0:
            found[key] = theirs / ours - 1
    return found
