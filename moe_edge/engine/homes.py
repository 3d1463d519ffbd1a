"""Experts computed at home: the layered engine's exchange with several devices.

The first device runs everything but the routed experts. Of a layer each home gets the
states `[T, D]`, computes the rows of the pairs whose experts stand in its slots, and
sends them back, all homes at once; the first device joins them (`home_programs`).
"""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from moe_edge.engine.home_programs import HomePrograms
from moe_edge.engine.layer_exchange import Placed
from moe_edge.kernels import grouped
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.homes import Homes


class HomeCalls:
    """Which homes run a layer, and their rows on the first device."""

    def __init__(self, homes: Homes, devices: Sequence[jax.Device]):
        self.homes, self.devices = homes, tuple(devices)
        # By shape, on the first device: rows of a home that computes none.
        self._no_rows: dict[tuple[int, ...], jax.Array] = {}
        # Numbers of tokens whose programs every home has run once: which homes a
        # routing needs must not decide what is compiled.
        self._compiled: set[tuple[str, int]] = set()

    def running(self, form: str, tokens: int, slots: np.ndarray) -> Iterable[int]:
        """The homes that have a part in a form of a layer; one at least."""
        if (form, tokens) not in self._compiled:
            self._compiled.add((form, tokens))
            return range(len(self.homes))
        here = slots[slots < len(self.homes.home_S)]
        return sorted(set(self.homes.home_S[here.reshape(-1)].tolist())) or [0]

    def gathered(self, rows: dict[int, jax.Array]) -> Sequence[jax.Array]:
        """Rows of every home on the first device."""
        shape, first = next(iter(rows.values())).shape, self.devices[0]
        if shape not in self._no_rows:
            minus_zeros = np.full(shape, -0.0, np.float32)
            self._no_rows[shape] = jax.device_put(minus_zeros, first)
        rows = {home: jax.device_put(each, first) for home, each in rows.items()}
        none = self._no_rows[shape]
        return tuple(rows.get(home, none) for home in range(len(self.homes)))


class AtHome(Placed):
    """What the layered engine hands to the programs of homes."""

    def __init__(self, homes: Homes, slots: HomeSlots):
        self._calls = HomeCalls(homes, slots.devices)
        super().__init__(slots.devices[0])
        self._homes, self._slots = homes, slots
        self._weighs = grouped.suits(slots.array[0])
        self._sent: tuple[jax.Array | None, dict[int, jax.Array]] = (None, {})

    def steps(self, programs, reads):
        self._programs = HomePrograms.of(programs, self._weighs)
        return self._programs

    def _to(self, home: int, array: jax.Array) -> jax.Array:
        """A layer's states on the device of a home; sent once a layer."""
        if self._sent[0] is not array:
            self._sent = array, {}
        copies = self._sent[1]
        if home not in copies:
            copies[home] = jax.device_put(array, self._calls.devices[home])
        return copies[home]

    def _weights_at(self, home: int, weights_TK):
        if not self._weighs:
            return None
        return jax.device_put(weights_TK, self._calls.devices[home])

    def chosen(self, layer, routed, slot_TK, reading, slots_SR, *other):
        rows = {}
        for home in self._calls.running("rows", len(slot_TK), slot_TK):
            rows[home] = self._programs.rows(
                self._to(home, routed.hidden_TD),
                self._homes.local(home, slot_TK),
                slots_SR[home],
                self._weights_at(home, reading.weights_TK),
            )
        given = reading.ids_TK, reading.weights_TK
        return routed, self._calls.gathered(rows), *given, *other

    # In waves each home keeps the rows of its pairs until the last.

    def start(self, routed, reading):
        return {}

    def wave(self, carry, routed, reading, slots_SR, slot_of):
        programs, done = self._programs, []
        for home in self._calls.running("waves", len(reading.ids_TK), slot_of):
            x_TD, ids_TK = self._to(home, routed.hidden_TD), reading.ids_TK
            if home not in carry:
                carry[home] = self._start(home, routed, reading)
            carry[home], is_done = programs.wave(
                carry[home],
                *(x_TD, ids_TK, slots_SR[home], self._homes.local(home, slot_of)),
                self._weights_at(home, reading.weights_TK),
            )
            done.append(is_done)
        return carry, done

    def _start(self, home: int, routed, reading) -> jax.Array:
        given = self._to(home, routed.hidden_TD), reading.ids_TK
        return self._programs.start(*given, self._slots.array[home])

    def finish(self, routed, reading, carry):
        carry = carry or {0: self._start(0, routed, reading)}  # padding alone
        # A program of its own: XLA would put the sum of rows into the sum over ranks,
        # and round otherwise.
        rows_PD = self._programs.merge(self._calls.gathered(carry))
        given = reading.ids_TK, reading.weights_TK
        return self._programs.finish(routed, rows_PD, *given)
