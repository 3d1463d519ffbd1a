"""What the host does between a layer's router and its experts.

The layered engine asks it: from the reading of a routing to the slots in which the
chosen experts stand, and the books of it (lookups, predictions, trace, timeline).
"""

from typing import NamedTuple

import numpy as np

from moe_edge.engine.layer_choice import Choice, Chooser, Reading
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.ticket import Ticket


class Place(NamedTuple):
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
      fetched: tickets of what had been absent.
      had_to_wait: in that time `LayerPlan.prefetch` was called.
    """

    slot_TK: np.ndarray
    fetched: list[Ticket]
    had_to_wait: bool


class LayerPlan:
    """The host's part of a layer.

    Args:
      manager: brings experts into slots.
      chooser: reads routings and looks experts up.
      prefetches: ask the predictor here (False: the engine does, elsewhere).
    """

    def __init__(self, manager: OffloadManager, chooser: Chooser, prefetches: bool):
        self.manager, self.chooser, self._prefetches = manager, chooser, prefetches
        self._dispatched_s = 0.0

    def look_up(self, place: Place, reading: Reading) -> Choice:
        """Looks the chosen experts up and tells the predictor."""
        return self.chooser.look_up(place.layer, reading, place.shape_BS, place.step)

    def note_ready(self, place: Place, reading: Reading) -> None:
        """The books of a layer whose experts were all there (`ready_slots`)."""
        choice = self.look_up(place, reading)
        self.prefetch(place)
        self.record(place, choice, self.manager.demanded, 0.0)

    def fits(self, place: Place, choice: Choice) -> bool:
        """Whether the layer's slots can hold all that it chose at once."""
        distinct = len(choice.hits) + len(choice.misses)
        return distinct <= self.manager.room(place.layer)

    def prefetch(self, place: Place) -> None:
        """Asks for what the predictor expects next."""
        if self._prefetches and place.is_decode:
            self.manager.prefetch(place.layer, place.step)

    def record(self, place: Place, choice: Choice, demanded: int, waited_s: float):
        """Adds a lookup to the trace; `demanded` is the manager's count before it."""
        moved = self.manager.demanded - demanded
        moved *= self.manager.mover.store.block_bytes
        self.chooser.record(
            place.layer, choice, place.shape_BS, place.first_step, moved, waited_s
        )

    # The timeline.

    def note_dispatch(self) -> None:
        """The device has work from here on."""
        if self.manager.recorder.enabled:
            self._dispatched_s = self.manager.recorder.clock.now()

    def note_compute(self, place: Place) -> None:
        """The time from a dispatch to its read-back: the experts of the layer before,
        then attention and router of this one."""
        recorder, started_s = self.manager.recorder, self._dispatched_s
        if recorder.enabled:
            read_s = self.chooser.read_s
            where = {"layer": place.layer, "step": place.step}
            recorder.add("compute", started_s, read_s - started_s, **where)
            recorder.add("route", read_s, **where)

    # Bringing experts, where all that a layer chose fits its slots.

    def bring(self, place: Place, choice: Choice, absent, meanwhile) -> Brought:
        """Brings what a layer chose; it must fit (`fits`).

        Args:
          absent: what to bring, best first.
          meanwhile: called without arguments while transfers travel.
        Returns:
          When all that was asked for has arrived.
        """
        manager, demanded, waited_s = self.manager, self.manager.demanded, 0.0
        at = place.layer, place.step, place.is_decode
        tickets = manager.arriving(place.layer, choice.hits)
        fetched = manager.fetch(place.layer, absent, place.step)
        if len(fetched) < len(absent):
            # Transfers under way have taken slots: when they have ended, all fits.
            waited_s = manager.wait(tickets + fetched, *at)
            manager.calm()
            fetched += manager.fetch(place.layer, absent[len(fetched) :], place.step)
            if len(fetched) < len(absent):
                raise RuntimeError(
                    f"layer {place.layer}: only {len(fetched)} of {len(absent)} absent "
                    "experts got slots"
                )
        tickets += fetched
        # While demands travel there is time to think ahead; if all is here there is
        # none before the dispatch.
        must_wait = not all(ticket.done for ticket in tickets)
        if must_wait:
            self.prefetch(place)
        meanwhile()
        waited_s += manager.wait(tickets, *at)
        self.record(place, choice, demanded, waited_s)
        slot_TK = manager.slots_TK(place.layer, choice.ids_TK)
        return Brought(slot_TK, fetched, must_wait)
