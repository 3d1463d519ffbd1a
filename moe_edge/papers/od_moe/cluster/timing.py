"""How long OD-MoE takes for a token, from the times of its parts; pure.

One layer after another: the main node's part, then its group's experts as soon as they
are loaded. A group loads for its next layer once it has computed and the shadow has
named the experts, or the layer has chosen them (OD-MoE, section 3.1; the departures as
in `shadow_node.py`).
"""

import dataclasses
from collections import deque

from moe_edge.core.checks import ConfigError, check_count, check_from_zero, check_known
from moe_edge.papers.od_moe.options import DEPARTURES
from moe_edge.papers.od_moe.shadow.predictor import is_due


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of a run's parts, in seconds.

    Attributes:
      layers: MoE layers.
      main_s: t_M, the main node's part of a layer, messages included.
      worker_s: t_W, a layer's experts.
      load_s: t_load, a worker's share of a layer; 0: all experts are there.
      shadow_s: t_shadow, a token of the shadow, which names layer by layer; None:
        nobody predicts, so a layer loads when it has chosen.
      groups: of workers.
      departure: one of `options.DEPARTURES`.
      token_period, kv_period: of alignment; 0 for never.
      missed_ratio: share of layers with a misprediction.
      reload_s: how long such a layer loads what is missing.
      kv_s: how long a step's keys and values travel to a shadow that waits for them;
        what is due carries those of all steps since the last time.
      align_s: what aligning keys and values costs it besides, each time.
      rotates: whether groups go on across tokens, or each token begins with the first.
      worker_layers: of whose share of blocks a worker has slots.
    """

    layers: int
    main_s: float
    worker_s: float
    load_s: float
    shadow_s: float | None = None
    groups: int = 2
    departure: str = "late"
    token_period: int = 1
    kv_period: int = 1
    missed_ratio: float = 0.0
    reload_s: float = 0.0
    kv_s: float = 0.0
    align_s: float = 0.0
    rotates: bool = True
    worker_layers: int = 1

    def __post_init__(self):
        """Raises ConfigError for what cannot be."""
        check_known("departure", self.departure, DEPARTURES)
        for name in ("layers", "groups", "worker_layers"):
            check_count(name, getattr(self, name))
        times = ["main_s", "worker_s", "load_s", "reload_s", "missed_ratio"]
        times += ["kv_s", "align_s"]
        times += ["token_period", "kv_period"]
        if self.shadow_s is not None:
            times.append("shadow_s")
        for name in times:
            check_from_zero(name, getattr(self, name))
        if self.missed_ratio > 1:
            raise ConfigError(f"missed_ratio is {self.missed_ratio}, expected 0 to 1")

    @property
    def resident_s(self) -> float:
        """Seconds a token where nothing is loaded."""
        return self.layers * (self.main_s + self.worker_s)

    def token_ends_s(self, tokens: int) -> list[float]:
        """When decode steps 1, 2, .. of a text end, from the beginning of the first."""
        ends_s, now_s, shadow = [], 0.0, _Shadow(self)
        # Of each group, when its link was free, and its last layers were computed.
        link_s = [0.0] * self.groups
        done_s = [deque([0.0] * self.worker_layers) for _ in link_s]
        missed_s = self.missed_ratio * self.reload_s
        for token in range(tokens):
            named_s = shadow.begin(token + 1, now_s)
            for layer in range(self.layers):
                count = token * self.layers + layer if self.rotates else layer
                group = count % self.groups
                chosen_s = now_s + self.main_s
                # A shadow that is slower than the model is of no use, and no harm.
                known_s = chosen_s if named_s is None else min(named_s[layer], chosen_s)
                room_s = max(link_s[group], done_s[group].popleft())
                loaded_s = link_s[group] = max(known_s, room_s) + self.load_s
                now_s = max(chosen_s, loaded_s) + missed_s + self.worker_s
                done_s[group].append(now_s)
            ends_s.append(now_s)
        return ends_s

    def token_s(self, tokens: int = 64) -> float:
        """Mean seconds of a decode step of a text with so many."""
        return self.token_ends_s(tokens)[-1] / tokens


class _Shadow:
    """When the shadow names the experts of each layer, step by step."""

    def __init__(self, timing: Timing):
        self._timing = timing
        self._free_s = self._before_s = 0.0

    def begin(self, step: int, now_s: float) -> list[float] | None:
        """The main node begins a step: when each of its layers is named."""
        timing = self._timing
        if timing.shadow_s is None:
            return None
        periods = timing.token_period, timing.kv_period
        waits = step == 1 or (
            timing.departure == "late" and any(is_due(step, n) for n in periods)
        )
        # Otherwise it runs ahead, by one step at most.
        start_s = max(now_s if waits else self._before_s, self._free_s)
        if waits and step > 1 and is_due(step, timing.kv_period):
            start_s += timing.kv_period * timing.kv_s + timing.align_s
        self._before_s, self._free_s = now_s, start_s + timing.shadow_s
        each_s = timing.shadow_s / timing.layers
        return [start_s + each_s * (layer + 1) for layer in range(timing.layers)]
