"""What the lookups of a run met: counters by phase, and events of each lookup.

The law, per layer and step: `hits` are the distinct experts that needed no transfer;
`misses` are the transfers that the layer had to wait for, those asked for on demand
and prefetches that came late, and experts that were computed elsewhere instead. A
layer that exceeds its slots may fetch an expert twice: two misses. So hits and misses
together may exceed the distinct experts.
"""

import dataclasses

from moe_edge.core.events import Recorder
from moe_edge.offload.layer_visit import LayerVisit


@dataclasses.dataclass
class Counters:
    """What lookups of one phase met; see the law above."""

    hits: int = 0
    misses: int = 0
    late: int = 0  # those misses whose prefetch was still on its way
    wait_s: float = 0.0  # seconds that the engine stood still for transfers

    @property
    def hit_ratio(self) -> float | None:
        total = self.hits + self.misses
        return self.hits / total if total else None


class Statistics:
    """Counts layers as they finish."""

    def __init__(self, recorder: Recorder | None):
        self.recorder = recorder or Recorder(enabled=False)
        self.reset()

    def reset(self) -> None:
        """Counts from here on."""
        self.counters = {True: Counters(), False: Counters()}  # by: was it decoding
        self.waves = {True: 0, False: 0}  # likewise, layers that exceeded their slots
        # Likewise, by layer: [hits, misses].
        self.layers: dict[bool, dict[int, list[int]]] = {True: {}, False: {}}
        # Experts that a lossy route saw while decoding, and changed.
        self.choices = self.rerouted = 0

    def count(self, visit: LayerVisit) -> None:
        """Enters a visit that has ended."""
        counters, hits = self.counters[visit.is_decode], len(visit.hits)
        misses = len(visit.missed) + len(visit.late)
        counters.hits += hits
        counters.misses += misses
        layer = self.layers[visit.is_decode].setdefault(visit.layer, [0, 0])
        layer[0] += hits
        layer[1] += misses
        counters.late += len(visit.late)
        counters.wait_s += visit.waited_s
        self.waves[visit.is_decode] += visit.in_waves
        if self.recorder.enabled:
            where = {"layer": visit.layer, "step": visit.step}
            for kind, experts in (
                ("hit", visit.hits),
                ("miss", (*visit.late, *visit.missed)),
            ):
                for expert in experts:
                    self.recorder.add(kind, visit.begun_s, expert=expert, **where)

    def count_route(self, choices: int, rerouted: int) -> None:
        """Enters what a route policy did with a layer's choices."""
        self.choices += choices
        self.rerouted += rerouted

    def waited(self, visit: LayerVisit, waited_s: float) -> None:
        """Records a wait, part of which may have passed before it was asked for."""
        start_s = max(visit.begun_s, self.recorder.clock.now() - waited_s)
        where = {"layer": visit.layer, "step": visit.step}
        self.recorder.add("wait", start_s, waited_s, **where)
