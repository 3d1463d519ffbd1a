"""What the host does between a layer's router and its experts.

The layered engine asks it: from the reading of a routing to the slots in which the
chosen experts stand, and the books of it (lookups, predictions, trace, timeline).
"""

from typing import NamedTuple

import numpy as np

from moe_edge.engine.routing_reader import Choice, Reading, RoutingReader
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.transfer import Transfer


class LayerStep(NamedTuple):
    """Where a layer and its host stand.

    Attributes:
      layer: of the model.
      step: counts lookup rounds.
      shape_BS: of the tokens.
      first_step: of the trace, in which the tokens begin.
    """

    layer: int
    step: int
    shape_BS: tuple[int, int]
    first_step: int

    @property
    def is_decode(self) -> bool:
        return self.shape_BS[1] == 1


class Brought(NamedTuple):
    """What `LayerPlan.bring` did.

    Attributes:
      slot_TK: int32 slots of the chosen experts, S where one has none.
      fetched: transfers of what had been absent.
      had_to_wait: in that time `LayerPlan.prefetch` was called.
    """

    slot_TK: np.ndarray
    fetched: list[Transfer]
    had_to_wait: bool


class LayerPlan:
    """The host's part of a layer.

    Args:
      manager: brings experts into slots.
      routing_reader: reads routings and looks experts up.
      prefetches: ask the predictor here (False: the engine does, elsewhere).
    """

    def __init__(
        self, manager: OffloadManager, routing_reader: RoutingReader, prefetches: bool
    ):
        self.manager, self.routing_reader, self._prefetches = (
            manager,
            routing_reader,
            prefetches,
        )
        self._dispatched_s = 0.0

    def look_up(self, at: LayerStep, reading: Reading) -> Choice:
        """Looks the chosen experts up and tells the predictor."""
        return self.routing_reader.look_up(at.layer, reading, at.shape_BS, at.step)

    def note_ready(self, at: LayerStep, reading: Reading) -> None:
        """The books of a layer whose experts were all there (`ready_slots`)."""
        choice = self.look_up(at, reading)
        self.prefetch(at)
        self.record(at, choice, self.manager.demanded, 0.0)

    def fits(self, at: LayerStep, choice: Choice) -> bool:
        """Whether the layer's slots can hold all that it chose at once."""
        distinct = len(choice.hits) + len(choice.misses)
        return distinct <= self.manager.room(at.layer)

    def prefetch(self, at: LayerStep) -> None:
        """Asks for what the predictor expects next."""
        if self._prefetches and at.is_decode:
            self.manager.prefetch(at.layer, at.step)

    def record(self, at: LayerStep, choice: Choice, demanded: int, waited_s: float):
        """Adds a lookup to the trace; `demanded` is the manager's count before it."""
        moved = self.manager.demanded - demanded
        moved *= self.manager.queue.store.block_bytes
        self.routing_reader.record(
            at.layer, choice, at.shape_BS, at.first_step, moved, waited_s
        )

    # The timeline.

    def note_dispatch(self) -> None:
        """The device has work from here on."""
        if self.manager.recorder.enabled:
            self._dispatched_s = self.manager.recorder.clock.now()

    def note_compute(self, at: LayerStep) -> None:
        """The time from a dispatch to its read-back: the experts of the layer before,
        then attention and router of this one."""
        recorder, started_s = self.manager.recorder, self._dispatched_s
        if recorder.enabled:
            read_s = self.routing_reader.read_s
            where = {"layer": at.layer, "step": at.step}
            recorder.add("compute", started_s, read_s - started_s, **where)
            recorder.add("route", read_s, **where)

    # Bringing experts, where all that a layer chose fits its slots.

    def bring(self, at: LayerStep, choice: Choice, absent, meanwhile) -> Brought:
        """Brings what a layer chose; it must fit (`fits`).

        Args:
          absent: what to bring, best first.
          meanwhile: called without arguments while transfers travel.
        Returns:
          When all that was asked for has arrived.
        """
        manager, demanded, waited_s = self.manager, self.manager.demanded, 0.0
        where = at.layer, at.step, at.is_decode
        transfers = manager.arriving(at.layer, choice.hits)
        fetched = manager.fetch(at.layer, absent, at.step)
        if len(fetched) < len(absent):
            # Transfers under way have taken slots: when they have ended, all fits.
            waited_s = manager.wait(transfers + fetched, *where)
            manager.drain()
            fetched += manager.fetch(at.layer, absent[len(fetched) :], at.step)
            if len(fetched) < len(absent):
                raise RuntimeError(
                    f"layer {at.layer}: only {len(fetched)} of {len(absent)} absent "
                    "experts got slots"
                )
        transfers += fetched
        # While demands travel there is time to think ahead; if all is here there is
        # none before the dispatch.
        must_wait = not all(transfer.done for transfer in transfers)
        if must_wait:
            self.prefetch(at)
        meanwhile()
        waited_s += manager.wait(transfers, *where)
        self.record(at, choice, demanded, waited_s)
        slot_TK = manager.slots_TK(at.layer, choice.ids_TK)
        return Brought(slot_TK, fetched, must_wait)
