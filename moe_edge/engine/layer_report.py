"""What a layered engine tells of its run: what lookups met, what moved, who helped."""

import dataclasses

import numpy as np

from moe_edge.engine.expert_state import ExpertState, Moved
from moe_edge.offload.layer_step import LayerStep


class LayerReport:
    """Of a `LayerStep`, since its counters were reset."""

    def __init__(self, layer_step: LayerStep):
        self._cache, self._queue = layer_step.cache, layer_step.queue
        self._run, self._statistics = layer_step.predictor_run, layer_step.statistics

    def movement(self) -> dict:
        """`hit_ratio` of decoding and `bytes_moved`."""
        stats = self._queue.stats()
        moved = stats.demand.bytes + stats.prefetch.bytes
        decode = self._statistics.counters[True]
        return {"hit_ratio": decode.hit_ratio, "bytes_moved": moved}

    def moved(self) -> Moved:
        """See `Engine.moved`."""
        counted, sent = self._statistics, self._queue.stats()
        sent_bytes = sent.demand.bytes, sent.prefetch.bytes, sent.wasted_bytes
        return Moved(*sent_bytes, counted.choices, counted.rerouted)

    def expert_state(self) -> ExpertState:
        """Where experts are; one on its way counts as resident."""
        cache, stats, run = self._cache, self._queue.stats(), self._run
        lookups = {}
        for phase, layers in self._statistics.layers.items():
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

    def rerouted(self) -> dict:
        """What a lossy route changed."""
        counted = self._statistics
        return {"choices": counted.choices, "rerouted": counted.rerouted}

    def summary(self) -> dict:
        """Everything counted, ready for JSON."""
        counters, queue = self._statistics.counters, self._queue
        phases = {"decode": counters[True], "prefill": counters[False]}
        return {
            "slots": self._cache.spec.num_slots,
            "block_bytes": queue.block_bytes,
            "eviction": self._cache.policy.name,
            "predictor": self._run.predictor.name,
            "link": queue.link.describe(),
            **{name: dataclasses.asdict(c) for name, c in phases.items()},
            "decode_layers_in_waves": self._statistics.waves[True],
            **self.movement(),
            **self._of_homes(),
            "transfers": dataclasses.asdict(queue.stats()),
            "prediction": self._run.accuracy.summary(),
        }

    def _of_homes(self) -> dict:
        """What each home has and got, where there are several."""
        if self._cache.homes is None:
            return {}
        parts = zip(self._cache.homes.slots_N, self._queue.report(), strict=True)
        return {"homes": [{"slots": slots} | each for slots, each in parts]}

    def remarks(self) -> list[str]:
        """What a user should know, a line each."""
        waves = self._statistics.waves[True]
        if self._run.is_idle or not waves:
            return []
        return [
            f"{waves} decode layers ran in waves (more experts than slots, or a batch "
            f"of many rows), where predictor {self._run.predictor.name} is off; raise "
            "device_memory or lower batch_size to use it"
        ]
