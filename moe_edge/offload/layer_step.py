"""One layer of one step: look up, demand, prefetch, wait, release. The one order.

The layered engine, its waves, replay in computed time and the cluster simulator all go
through `LayerStep`, so none has an order of its own:

1. look up: hits are refreshed, queued prefetches that the layer did not choose are
   taken back, and the predictor is told;
2. demand: misses, best first, after late prefetches, which become as urgent;
3. prefetch: what the predictor names, while demands travel; where nothing travels, once
   the layer is dispatched, or just before where programs run in the caller's thread;
4. wait for what was demanded;
5. release: chosen experts stay in their slots until the next lookup, whose routing
   shows that this layer has been computed, or between the waves of a layer.

A layer that chose more than its slots hold passes in waves, which prefetch nothing: the
next wave would throw it out again.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from moe_edge.core.events import Recorder
from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.carrier import Transfer
from moe_edge.offload.layer_visit import LayerVisit
from moe_edge.offload.prefetch import Prefetcher
from moe_edge.offload.residency import Residency
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.statistics import Counters, Statistics
from moe_edge.predict.base import Predictor
from moe_edge.predict.predictor_run import PredictorRun


class LayerStep:
    """Brings a layer's experts into slots, and later layers' ahead.

    Several sequences may take turns: predictors and policies with a record per sequence
    have one for each. A predictor keeps the rows of a batch apart, an eviction policy
    has one record for all of them, in the name of the first.

    Args:
      cache: says which block is in which slot, and who goes; `residency` joins it with
        the queue and with the pins of slots that must keep what they hold.
      queue: brings the blocks.
      predictor: names later experts; None prefetches nothing.
      horizon: layers ahead that are prefetched.
      prefetch_limit: most prefetches asked for after one lookup.
    """

    def __init__(
        self,
        cache: SlotCache,
        queue: BlockQueue,
        *,
        predictor: Predictor | None = None,
        horizon: int = 1,
        prefetch_limit: int = 8,
        recorder: Recorder | None = None,
    ):
        self.cache, self.queue, self.spec = cache, queue, cache.spec
        self.prefetch_limit = prefetch_limit
        self.residency = Residency(cache, queue)
        self.predictor_run = PredictorRun(predictor or Predictor(), self.spec, horizon)
        self.prefetcher = Prefetcher(self.residency, self.predictor_run, prefetch_limit)
        self.statistics = Statistics(recorder)
        self.recorder = self.statistics.recorder

    @property
    def counters(self) -> dict[bool, Counters]:
        """By whether it was decoding."""
        return self.statistics.counters

    def look_up(
        self, layer, ids_TK, scores_TE, step, is_decode=True, sequence=0
    ) -> LayerVisit:
        """Refreshes a layer's chosen experts: its visit begins."""
        hits, misses = self.cache.look_up(layer, ids_TK, scores_TE, step, sequence)
        late = []
        if self.residency.is_busy or not self.predictor_run.is_idle:
            late = self.residency.settle_lookup(layer, hits, misses)
            hits = [expert for expert in hits if expert not in late]
        begun_s = self.recorder.clock.now() if self.recorder.enabled else 0.0
        found = hits, late, misses, [*hits, *late, *misses]
        may_prefetch = is_decode and self.prefetcher.follows_routing
        return LayerVisit(layer, step, is_decode, *found, begun_s, may_prefetch)

    def begin(self, seen) -> LayerVisit:
        """`look_up` of an engine's `Reading`, which the predictor is told."""
        layer, ids_TK, scores_TE = seen.layer, seen.ids_TK, seen.scores_TE
        given = layer, ids_TK, scores_TE, seen.step, seen.is_decode
        visit, run = self.look_up(*given, seen.sequences[0]), self.predictor_run
        rows = {"sequences": seen.sequences, "shape_BS": seen.shape_BS}
        if not run.is_idle:
            run.show(layer, ids_TK, scores_TE, seen.hidden_TD, **rows)
        if seen.wanted_NE is not None:
            run.store(layer, seen.wanted_NE)
        return visit

    def fits(self, visit: LayerVisit) -> bool:
        """Whether the layer's slots hold all it chose at once; ask before its waves."""
        return self.cache.fits(visit.layer, visit.chosen)

    def bring(
        self,
        visit: LayerVisit,
        absent: Sequence[int] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Transfer]:
        """Brings what a layer chose; it must fit (`fits`).

        Args:
          absent: what to fetch, best first; None: all misses.
          meanwhile: called while transfers travel.
        Returns:
          transfers of `absent`, arrived.
        """
        absent = visit.misses if absent is None else absent
        late = self.residency.underway(visit.layer, visit.late)
        for transfer in late:
            self.queue.promote(transfer)
        fetched = self.demand(visit, absent) if absent else []
        if len(fetched) < len(absent):
            # Transfers under way have taken slots: when they have ended, all fits.
            self.wait(visit, late + fetched)
            self._waited(visit, self.residency.drain())
            fetched += self.demand(visit, absent[len(fetched) :])
            if len(fetched) < len(absent):
                raise RuntimeError(
                    f"layer {visit.layer}: only {len(fetched)} of {len(absent)} absent "
                    "experts got slots"
                )
        visit.transfers = late + fetched
        # While demands travel there is time to think ahead.
        if visit.transfers:
            self.think_ahead(visit)
        if meanwhile is not None:
            meanwhile()
        self.wait(visit, visit.transfers)
        return fetched

    def begin_waves(self, visit: LayerVisit) -> None:
        """More was chosen than fits: nothing else may be on its way."""
        visit.in_waves, visit.may_prefetch = True, False
        self._waited(visit, self.residency.drain())

    def runs(self, visit: LayerVisit, ids_TK: np.ndarray) -> Iterator[tuple[int, int]]:
        """Brings run after run of the (token, expert) pairs, in their order.

        Yields:
          (first, end) of the pairs whose experts are in slots now; they must be
          computed before the next run is asked for.
        """
        self.begin_waves(visit)
        for first, end, absent, here in self.cache.runs(visit.layer, ids_TK):
            transfers = self.demand(visit, absent, here)
            if len(transfers) < len(absent):
                raise RuntimeError(
                    f"layer {visit.layer}: {len(absent)} experts got no slots"
                )
            self.wait(visit, transfers)
            visit.transfers += transfers
            yield first, end

    def demand(self, visit: LayerVisit, experts, busy=()) -> list[Transfer]:
        """Asks for experts, best first; `busy` slots are read by programs in flight."""
        transfers = self.residency.demand(visit.layer, experts, visit.step, busy)
        asked = [transfer.expert for transfer in transfers]
        visit.missed, visit.moved = visit.missed + asked, visit.moved + len(asked)
        if visit.in_waves:
            visit.thrown_out(asked)
        return transfers

    def think_ahead(self, visit: LayerVisit) -> None:
        """Prefetches, unless this visit has done so or does not."""
        if visit.may_prefetch:
            self.prefetch(visit)

    def prefetch(self, visit: LayerVisit) -> None:
        """Asks for what the predictor names, once a visit."""
        visit.may_prefetch = False
        self.prefetcher.prefetch(visit.layer, visit.step)

    def wait(self, visit: LayerVisit, transfers) -> None:
        """Returns when the blocks are in their slots."""
        if transfers:
            self._waited(visit, self.residency.wait(transfers))

    def _waited(self, visit: LayerVisit, waited_s: float) -> None:
        visit.waited_s += waited_s
        if waited_s and self.recorder.enabled:
            self.statistics.waited(visit, waited_s)

    def finish(self, visit: LayerVisit) -> None:
        """The layer is dispatched: thinks ahead if that is still to do, and counts."""
        self.think_ahead(visit)
        self.statistics.count(visit)

    def enter(self, layer, ids_TK, scores_TE, step, sequences) -> LayerVisit:
        """What has arrived by now counts; looks up, and shows the predictor rows."""
        self.queue.poll()
        visit = self.look_up(layer, ids_TK, scores_TE, step)
        rows = {"sequences": sequences, "shape_BS": (len(sequences), 1)}
        self.predictor_run.show(layer, ids_TK, scores_TE, **rows)
        return visit

    def look_ahead(self, wanted_LE, step: int) -> None:
        """Stores what a token's layers are expected to choose; asks for the first."""
        self.predictor_run.store(-1, wanted_LE)
        self.prefetcher.prefetch(-1, step)

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
        self.cache.empty()

    def restart(self) -> None:
        """As new: every slot empty, policy and predictor without a record."""
        self.drain()
        self.cache.restart()
        self.predictor_run.restart()

    def recover(self) -> None:
        """As `restart`, after an error that may have left transfers half done."""
        self.residency.recover()
        self.restart()

    def reset_counters(self) -> None:
        """Counts from here on, as after a warm-up; blocks and policies stay."""
        self.statistics.reset()
        self.predictor_run.reset_accuracy()
        self.queue.reset_stats()
        self.recorder.clear()
