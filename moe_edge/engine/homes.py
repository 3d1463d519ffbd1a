"""Experts computed at home: the layered engine's exchange with several devices.

The first device runs everything but the routed experts. Of a layer each home gets the
states `[T, D]`, computes the rows of the pairs whose experts stand in its slots, and
sends them back, all homes at once; the first device joins them (`home_programs`).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from moe_edge.engine.home_programs import HomePrograms
from moe_edge.engine.layer_exchange import Arrays, Placed, Words
from moe_edge.kernels import native
from moe_edge.model import expert_groups
from moe_edge.model.record import RecordLayout
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.homes import Homes
from moe_edge.offload.slots import Slots

PIECE = 64  # rows that a home sends at once, at least where it has more


class Carried(NamedTuple):
    """A layer in waves: rows of each home, and which home computed an expert (E: none
    is computed)."""

    rows: dict[int, jax.Array]
    home_E: np.ndarray


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

    def joined(
        self, programs: HomePrograms, rows: dict[int, jax.Array], home_P: np.ndarray
    ) -> jax.Array:
        """Rows `[P, D]` on the first device, each from its home; zeros where it has
        none.

        Args:
          rows: of homes, `[P, D]` and more.
          home_P: the home of each row; other numbers are no homes.
        """
        P, N, joined = len(home_P), len(self.homes), None
        size = P if P <= PIECE else max(PIECE, -(-P // (2 * N)))
        spare = np.arange(P, P + size, dtype=np.int32)
        for home, rows_PD in rows.items():
            own = np.flatnonzero(home_P == home).astype(np.int32)
            # At least one piece: what is compiled must not depend on the routing.
            for first in range(0, max(1, len(own)), size):
                row_C = own[first : first + size]
                row_C = np.concatenate([row_C, spare[len(row_C) :]])
                piece_CD = programs.take(rows_PD, row_C)
                piece_CD = jax.device_put(piece_CD, self.devices[0])
                if joined is None:
                    joined = programs.put_first(piece_CD, row_C, count=P)
                else:
                    joined = programs.put(joined, piece_CD, row_C)
        return joined

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
        self._sent: tuple[jax.Array | None, dict[int, jax.Array]] = (None, {})

    def steps(self, programs, reads):
        layout = RecordLayout.of(programs.config)
        suits = native.within(expert_groups.suits)  # as where a home computes
        self._weighs = suits(self._slots.array[0], layout)
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
        E = self._programs.num_experts
        return Carried({}, np.full(E + 1, len(self._homes), np.int32))

    def wave(self, carry, routed, reading, slots_SR, slot_of):
        programs, done = self._programs, []
        is_here_E = slot_of < len(self._homes.home_S)
        carry.home_E[:-1][is_here_E] = self._homes.home_S[slot_of[is_here_E]]
        for home in self._calls.running("waves", len(reading.ids_TK), slot_of):
            x_TD, ids_TK = self._to(home, routed.hidden_TD), reading.ids_TK
            if home not in carry.rows:
                carry.rows[home] = self._start(home, routed, reading)
            carry.rows[home], is_done = programs.wave(
                carry.rows[home],
                *(x_TD, ids_TK, slots_SR[home], self._homes.local(home, slot_of)),
                self._weights_at(home, reading.weights_TK),
            )
            done.append(is_done)
        return carry, done

    def _start(self, home: int, routed, reading) -> jax.Array:
        given = self._to(home, routed.hidden_TD), reading.ids_TK
        return self._programs.start(*given, self._slots.array[home])

    def finish(self, routed, reading, carry):
        rows = carry.rows or {0: self._start(0, routed, reading)}  # padding alone
        home_P = carry.home_E[reading.ids_TK.reshape(-1)]
        if not self._programs.is_pairs(len(reading.ids_TK)):
            home_P = home_P[reading.ids_TK.reshape(-1).argsort(kind="stable")]
        rows_PD = self._calls.joined(self._programs, rows, home_P)
        given = reading.ids_TK, reading.weights_TK
        return self._programs.finish(routed, rows_PD, *given)


def exchange_of(
    homes: Homes | None, slots: Slots | HomeSlots, in_words: bool
) -> Arrays:
    """How a layered engine calls its programs, by where its slots are."""
    if isinstance(slots, HomeSlots):
        return AtHome(homes, slots)
    return Words(jax.local_devices()[0]) if in_words else Arrays()
