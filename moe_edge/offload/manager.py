"""The offload manager: brings a layer's experts into slots, and later layers' ahead.

It joins residency, prefetching and statistics. The engine says what a layer chose and
dispatches programs; the `LayerVisit` of a lookup says in which order blocks come. It
touches no model code.
"""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from moe_edge.core.events import Recorder
from moe_edge.offload.home_queues import HomeQueues, Queues
from moe_edge.offload.layer_visit import LayerVisit
from moe_edge.offload.prefetch import Prefetcher
from moe_edge.offload.residency import Residency
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.statistics import Counters, Statistics
from moe_edge.predict.base import Predictor
from moe_edge.predict.predictor_run import PredictorRun


class OffloadManager:
    """Keeps a layer's experts where programs can read them.

    Several sequences may take turns: predictors and policies with a record per sequence
    have one for each. A predictor keeps the rows of a batch apart, an eviction policy
    has one record for all of them, in the name of the first.

    Args:
      predictor: names later experts; None prefetches nothing.
      horizon: layers ahead that are prefetched.
      prefetch_limit: most prefetches asked for after one lookup.
    """

    def __init__(
        self,
        cache: SlotCache,
        queue: Queues,
        *,
        predictor: Predictor | None = None,
        horizon: int = 1,
        prefetch_limit: int = 8,
        recorder: Recorder | None = None,
    ):
        self.cache, self.queue, self.spec = cache, queue, cache.spec
        self.residency = Residency(cache, queue)
        self.predictor_run = PredictorRun(predictor or Predictor(), self.spec, horizon)
        self.prefetcher = Prefetcher(self.residency, self.predictor_run, prefetch_limit)
        self.statistics = Statistics(recorder)

    @property
    def recorder(self) -> Recorder:
        return self.statistics.recorder

    @property
    def counters(self) -> dict[bool, Counters]:
        """By whether it was decoding."""
        return self.statistics.counters

    # Lookups.

    def look_up(
        self, layer, ids_TK, scores_TE, step, is_decode=True, sequence=0
    ) -> LayerVisit:
        """Refreshes a layer's chosen experts: its visit begins."""
        hits, misses = self.cache.look_up(layer, ids_TK, scores_TE, step, sequence)
        late, pins = [], self.residency.pins
        if pins.expected or pins.moving or not self.predictor_run.is_idle:
            base = layer * self.spec.num_experts
            chosen = {base + expert for expert in (*hits, *misses)}
            self.residency.take_back(layer, chosen)
            pins.settle()
            for key in chosen:
                pins.forget(key)
            for expert in hits:
                self.queue.used(base + expert)
            late = [t.expert for t in self.residency.underway(layer, hits)]
            if late:
                hits = [expert for expert in hits if expert not in late]
        where, found = (self, layer, step, is_decode), (hits, late, misses)
        may_prefetch = is_decode and self.prefetcher.follows_routing
        return LayerVisit(*where, *found, self.statistics.now(), may_prefetch)

    def look_ahead(self, wanted_LE, step: int) -> None:
        """Takes what is expected of a token's layers, and asks for the first of them.

        Args:
          wanted_LE: as the predictor's `store` takes it.
        """
        self.predictor_run.store(-1, wanted_LE)
        self.prefetcher.prefetch(-1, step)

    def pass_layer(
        self, layer, ids_TK, scores_TE, step, sequences: Sequence[int] = (0,)
    ) -> LayerVisit:
        """A whole visit in computed time, where programs cost the caller nothing.

        Args:
          sequences: numbers of the rows' sequences; one: of all rows.
        """
        self.queue.poll()
        visit = self.look_up(layer, ids_TK, scores_TE, step)
        if len(sequences) > 1:
            rows = {"sequences": sequences, "shape_BS": (len(sequences), 1)}
            self.predictor_run.show(layer, ids_TK, scores_TE, **rows)
        else:
            one = sequences[0]
            self.predictor_run.observe(layer, ids_TK, scores_TE, sequence_T=one)
        if visit.fits:
            visit.bring()
        else:
            for _ in visit.runs(ids_TK):
                pass
        visit.finish()
        return visit

    # Sequences.

    def drain(self) -> None:
        """Takes back all queued prefetches and waits for the transfer under way."""
        self.residency.drain()

    def finish_sequences(self, running: Collection[int] = ()) -> None:
        """The records of all but the running go; blocks stay, and transfers go on."""
        self.predictor_run.finish_sequences(running)
        self.cache.finish_sequences(running)

    def empty(self) -> None:
        """Takes every block out of its slot; the sequence's records end."""
        self.drain()
        for layer, expert in np.argwhere(self.cache.slot_LE >= 0).tolist():
            self.cache.drop(layer, expert)
        self.cache.finish_sequences()

    def restart(self) -> None:
        """As new: every slot empty, policy and predictor without a record."""
        self.drain()
        self.cache.restart()
        self.predictor_run.restart()

    def recover(self) -> None:
        """As `restart`, after an error that may have left transfers half done."""
        self.queue.recover()
        self.residency.pins.clear()
        self.restart()

    # What was counted.

    def reset_counters(self) -> None:
        """Counts from here on, as after a warm-up; blocks and policies stay."""
        self.statistics.reset()
        self.predictor_run.reset_accuracy()
        self.queue.reset_stats()

    def movement(self) -> dict:
        """`hit_ratio` of decoding and `bytes_moved`, since the counters were reset."""
        stats = self.queue.stats()
        moved = stats.demand.bytes + stats.prefetch.bytes
        return {"hit_ratio": self.counters[True].hit_ratio, "bytes_moved": moved}

    def _of_homes(self) -> dict:
        """What each home has and got, where there are several."""
        if not isinstance(self.queue, HomeQueues):
            return {}
        parts = zip(self.cache.homes.slots_N, self.queue.report(), strict=True)
        return {"homes": [{"slots": slots} | each for slots, each in parts]}

    def report(self) -> dict:
        """Everything counted since the counters were reset, ready for JSON."""
        phases = {"decode": self.counters[True], "prefill": self.counters[False]}
        return {
            "slots": self.spec.num_slots,
            "block_bytes": self.queue.block_bytes,
            "eviction": self.cache.policy.name,
            "predictor": self.predictor_run.predictor.name,
            "link": self.queue.link.describe(),
            **{name: dataclasses.asdict(c) for name, c in phases.items()},
            "decode_layers_in_waves": self.statistics.waves[True],
            **self.movement(),
            **self._of_homes(),
            "transfers": dataclasses.asdict(self.queue.stats()),
            "prediction": self.predictor_run.accuracy.summary(),
        }
