"""What a layered engine tells of its run: what lookups met, what moved, who helped."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.engine.backends import Backend
from moe_edge.engine.companion import Companion
from moe_edge.engine.expert_state import ExpertState, Moved, Watched
from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.statistics import Statistics
from moe_edge.predict.predictor_run import PredictorRun
from moe_edge.route.base import Route


class LayerReport(Watched):
    """What `Watched` asks of an engine over a `LayerStep`, whose parts it has."""

    cache: SlotCache
    queue: BlockQueue
    predictor_run: PredictorRun
    statistics: Statistics
    route: Route
    backends: Sequence[Backend]
    shadow: Companion | None

    def movement(self) -> dict:
        stats = self.queue.stats()
        moved = stats.demand.bytes + stats.prefetch.bytes
        decode = self.statistics.counters[True]
        return {"hit_ratio": decode.hit_ratio, "bytes_moved": moved}

    def moved(self) -> Moved:
        counted, sent = self.statistics, self.queue.stats()
        sent_bytes = sent.demand.bytes, sent.prefetch.bytes, sent.wasted_bytes
        return Moved(*sent_bytes, counted.choices, counted.rerouted)

    def device_bytes(self) -> int:
        held = self.weights.num_bytes + self.queue.slots.num_bytes
        return held + (self.shadow.num_bytes if self.shadow else 0)

    def expert_state(self) -> ExpertState:
        """Where experts are; one on its way counts as resident."""
        cache, run = self.cache, self.predictor_run
        stats, lookups = self.queue.stats(), {}
        for phase, layers in self.statistics.layers.items():
            lookups[phase] = np.zeros((cache.spec.num_layers, 2), np.int64)
            for layer, counts in layers.items():
                lookups[phase][layer] = counts
        return ExpertState(
            "layered",
            list(cache.room_L),
            cache.slot_LE >= 0,
            lookups,
            stats.demand.bytes,
            stats.prefetch.bytes,
            stats.wasted_bytes,
            None if run.is_idle else run.accuracy.summary(),
        )

    def report(self) -> dict:
        counted, run = self.statistics, self.predictor_run
        mode = {"mode": "layered", "route": self.route.name, "lossless": self.lossless}
        if not self.lossless:
            mode |= {"choices": counted.choices, "rerouted": counted.rerouted}
        if self.shadow is not None:
            mode["shadow_bytes"] = self.shadow.num_bytes
        phases = {"decode": counted.counters[True], "prefill": counted.counters[False]}
        return mode | {
            "host_computed": sum(backend.computed for backend in self.backends),
            "slots": self.cache.spec.num_slots,
            "block_bytes": self.queue.block_bytes,
            "eviction": self.cache.policy.name,
            "predictor": run.predictor.name,
            "link": self.queue.link.describe(),
            **{name: dataclasses.asdict(c) for name, c in phases.items()},
            "decode_layers_in_waves": counted.waves[True],
            **self.movement(),
            **self._of_homes(),
            "transfers": dataclasses.asdict(self.queue.stats()),
            "prediction": run.accuracy.summary(),
        }

    def _of_homes(self) -> dict:
        """What each home has and got, where there are several."""
        homes = self.cache.homes
        if homes is None:
            return {}
        parts = zip(homes.slots_N, self.queue.report(), strict=True)
        return {"homes": [{"slots": slots} | each for slots, each in parts]}

    def remarks(self) -> list[str]:
        run = self.predictor_run
        waves = self.statistics.waves[True]
        if run.is_idle or not waves:
            return []
        return [
            f"{waves} decode layers ran in waves (more experts than slots, or a batch "
            f"of many rows), where predictor {run.predictor.name} is off; raise "
            "device_memory or lower batch_size to use it"
        ]
