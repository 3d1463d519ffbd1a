"""Where a model's experts are and what lookups met, for whoever watches a run."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from moe_edge.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ExpertState:
    """Of one moment; what is counted began at `Engine.reset_records`.

    Attributes:
      mode: `resident`, `layered` or `fused`.
      slots_L: how many slots may hold experts of a layer; a slot may serve several.
      resident_LE: bool, who is in a slot.
      lookups: int64 `[L, 2]` by whether it was decoding: hits and misses, after the law
        of `offload/statistics.py`.
      demand_bytes, prefetch_bytes: that came to the device; wasted_bytes: of
        prefetched experts that were thrown out before any use.
      prediction: as `PredictionLog.summary`; None without a predictor.
    """

    mode: str
    slots_L: list[int]
    resident_LE: np.ndarray
    lookups: dict[bool, np.ndarray]
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    wasted_bytes: int = 0
    prediction: dict[str, Any] | None = None


class Moved(NamedTuple):
    """What an engine's steps moved and changed so far.

    Attributes:
      demand_bytes, prefetch_bytes: of expert blocks, by why they were asked for.
      wasted_bytes: of those prefetched, overwritten before any use.
      routed: (token, expert) pairs that a route saw; substituted: of those, the
        changed ones.
    """

    demand_bytes: int = 0
    prefetch_bytes: int = 0
    wasted_bytes: int = 0
    routed: int = 0
    substituted: int = 0

    @property
    def bytes(self) -> int:
        return self.demand_bytes + self.prefetch_bytes


def all_resident(config: ModelConfig) -> ExpertState:
    """Every expert has its place for good, and nothing is looked up."""
    L, E = config.num_layers, config.moe.num_experts
    resident_LE = np.zeros((L, E), bool)
    resident_LE[list(config.moe_layers)] = True
    nothing = {phase: np.zeros((L, 2), np.int64) for phase in (True, False)}
    return ExpertState(
        "resident", resident_LE.sum(axis=1).tolist(), resident_LE, nothing
    )
