"""Where a model's experts are and what lookups met, for whoever watches a run."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from moe_edge.engine.weights import Weights
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


class Watched:
    """What an engine tells of its run; where all experts are resident, little."""

    config: ModelConfig
    weights: Weights

    def reset_records(self) -> None:
        """Forgets counters, traces and events so far: after a warm-up."""

    def restart(self) -> None:
        """As new, but for what is compiled: no expert in a slot, nothing on record."""
        self.reset_records()

    def recover(self) -> None:
        """After a step that raised: new sessions run as before it.

        Those that ran are lost, and so may be what an engine keeps between steps:
        offloaded ones begin with empty slots.
        """

    def movement(self) -> dict:
        """`hit_ratio` (decode) and `bytes_moved` since `reset_records`."""
        return {"hit_ratio": None, "bytes_moved": 0}  # resident: nothing can miss

    def moved(self) -> Moved:
        """What moved since `reset_records`; cheap once a step's tokens are known."""
        return Moved()

    def device_bytes(self) -> int:
        """Bytes of the device that it holds between sessions: weights and slots."""
        return self.weights.num_bytes

    def expert_state(self) -> ExpertState:
        """Where experts are and what lookups met; waits for the device."""
        return all_resident(self.config)

    def report(self) -> dict:
        """More of the same: what a run's `offload.json` holds; empty if resident."""
        return {}

    def remarks(self) -> list[str]:
        """What a user should know of the run, a line each."""
        return []
