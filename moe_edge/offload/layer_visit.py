"""One layer of one step: look up, demand, prefetch, wait, release. The one order.

The layered engine, its waves, replay in computed time and the cluster simulator all go
through this object, so none has an order of its own:

1. look up (`OffloadManager.look_up`): hits are refreshed, queued prefetches that the
   layer did not choose are taken back;
2. demand: misses, best first, after late prefetches, which become as urgent;
3. prefetch: what the predictor names, while demands travel; where nothing travels,
   once the layer is dispatched (`finish`), or just before on a device that is the
   caller's own thread (`think_ahead`);
4. wait for what was demanded;
5. release: chosen experts stay in their slots until the next lookup, whose routing
   shows that this layer has been computed, or between the waves of a layer.

A layer that chose more than its slots hold passes in waves, which prefetch nothing: the
next wave would throw it out again.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from moe_edge.offload.block_queue import Transfer

if TYPE_CHECKING:
    from moe_edge.offload.manager import OffloadManager


@dataclasses.dataclass(eq=False, slots=True)
class LayerVisit:
    """A lookup and what followed from it."""

    _manager: "OffloadManager"
    layer: int
    step: int
    is_decode: bool
    hits: list[int]  # experts that needed no transfer; in waves some may still come to
    late: list[int]  # prefetched experts that were still on their way at the lookup
    misses: list[int]  # absent at the lookup, best first
    begun_s: float  # when, in the run's time, where events are recorded
    _may_prefetch: bool
    # Experts asked for on demand or computed elsewhere, each time.
    missed: list[int] = dataclasses.field(default_factory=list)
    transfers: list[Transfer] = dataclasses.field(default_factory=list)  # waited for
    moved: int = 0  # how many transfers were demanded
    waited_s: float = 0.0
    in_waves: bool = False  # it passed in waves

    @property
    def fits(self) -> bool:
        """Whether the layer's slots hold all it chose at once; ask before its waves."""
        return self._manager.cache.fits(self.layer, self.chosen)

    @property
    def chosen(self) -> list[int]:
        """All experts of the lookup."""
        return [*self.hits, *self.late, *self.misses]

    @property
    def travels(self) -> bool:
        """Whether something was asked for that the layer waits for."""
        return bool(self.transfers)

    def demand(self, experts, busy=()) -> list[Transfer]:
        """Asks for experts, best first: transfers of those that got a slot.

        Args:
          busy: slots that programs in flight read.
        """
        transfers = self._manager.residency.demand(self.layer, experts, self.step, busy)
        self.moved += len(transfers)
        for transfer in transfers:
            self._miss(transfer.expert)
        return transfers

    def _miss(self, expert: int) -> None:
        self.missed.append(expert)
        if self.in_waves:  # a wave before, or draining for it, has thrown it out
            for group in (self.hits, self.late):
                if expert in group:
                    group.remove(expert)

    def computed_elsewhere(self, experts) -> None:
        """Absent experts that are not fetched: a backend computes them."""
        self.missed += experts

    def think_ahead(self) -> None:
        """Prefetches, unless this visit has done so or does not."""
        if self._may_prefetch:
            self.prefetch()

    def prefetch(self) -> None:
        """Asks for what the predictor names, once a visit."""
        self._may_prefetch = False
        self._manager.prefetcher.prefetch(self.layer, self.step)

    def wait(self, transfers) -> None:
        """Returns when the blocks are in their slots."""
        if transfers:
            residency = self._manager.residency
            waited_s = residency.queue.wait(transfers)
            residency.pins.settle()
            self._note_wait(waited_s)

    def _drain(self) -> None:
        """Nothing is on its way any more; the layer has waited for that too."""
        if waited_s := self._manager.residency.drain():
            self._note_wait(waited_s)

    def _note_wait(self, waited_s: float) -> None:
        """A wait has ended, part of which may have passed before it was asked for."""
        statistics = self._manager.statistics
        start_s = max(self.begun_s, statistics.now() - waited_s)
        statistics.waited(self, start_s, waited_s)

    def release(self) -> None:
        """A wave is computed: its experts may leave their slots."""
        self._manager.cache.release()

    def bring(self, absent=None, meanwhile: Callable[[], None] | None = None):
        """Brings what a layer chose; it must fit (`fits`).

        Args:
          absent: what to fetch, best first; None: all misses.
          meanwhile: called while transfers travel.
        Returns:
          transfers of `absent`, arrived.
        """
        residency = self._manager.residency
        absent = self.misses if absent is None else absent
        transfers = residency.underway(self.layer, self.late) if self.late else []
        for transfer in transfers:
            residency.queue.promote(transfer)
        fetched = self.demand(absent)
        if len(fetched) < len(absent):
            # Transfers under way have taken slots: when they have ended, all fits.
            self.wait(transfers + fetched)
            self._drain()
            fetched += self.demand(absent[len(fetched) :])
            if len(fetched) < len(absent):
                raise RuntimeError(
                    f"layer {self.layer}: only {len(fetched)} of {len(absent)} absent "
                    "experts got slots"
                )
        self.transfers = transfers + fetched
        # While demands travel there is time to think ahead.
        if self.travels:
            self.think_ahead()
        if meanwhile is not None:
            meanwhile()
        self.wait(self.transfers)
        return fetched

    def begin_waves(self) -> None:
        """More was chosen than fits: nothing else may be on its way."""
        self.in_waves, self._may_prefetch = True, False
        self._drain()

    def runs(self, ids_TK: np.ndarray) -> Iterator[tuple[int, int]]:
        """Brings run after run of the (token, expert) pairs, in their order.

        Yields:
          (first, end) of the pairs whose experts are in slots now; they must be
          computed before the next run is asked for.
        """
        self.begin_waves()
        cache = self._manager.cache
        for first, end, absent, here in cache.runs(self.layer, ids_TK):
            transfers = self.demand(absent, here)
            if len(transfers) < len(absent):
                raise RuntimeError(
                    f"layer {self.layer}: {len(absent)} experts got no slots"
                )
            self.wait(transfers)
            self.transfers += transfers
            yield first, end

    def finish(self) -> None:
        """The layer is dispatched: thinks ahead if that is still to do, and counts."""
        self.think_ahead()
        self._manager.statistics.count(self)
