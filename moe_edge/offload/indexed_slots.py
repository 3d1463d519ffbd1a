"""Device slots that are written without an array of the host.

On a GPU a program that takes one NumPy argument costs the caller 100 us more, however
small it is. So the numbers of slots stand on the device, and all blocks that have
arrived go into their slots by one program.
"""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from moe_edge.offload.slots import DonatedSlots
from moe_edge.offload.store import host_sharding

SIZES = (1, 2, 4, 8)  # blocks of a program


class IndexedSlots(DonatedSlots):
    """`DonatedSlots` whose array has a stated place from the start, as what is computed
    from pinned memory has.

    `fetch` and `commit` belong to the thread that dispatches the programs.
    """

    max_staged = SIZES[-1]
    gathers = True

    def __init__(
        self,
        num_slots: int,
        record_size: int,
        dtype: np.dtype,
        device: jax.Device | None = None,
    ):
        device = device or jax.local_devices()[0]
        super().__init__(num_slots, record_size, dtype, device)
        self._numbers: dict[int, jax.Array] = {}
        empty_R = jax.device_put(np.zeros(record_size, dtype), device)
        for size in SIZES:  # all programs are compiled before a block comes
            self._write(size * [0], size * [empty_R])

    def prepare_fetches(self) -> None:
        """Compiles what `fetch` calls; empties slot 0."""
        empty_R = np.zeros(self.array.shape[1], self.array.dtype)
        there = host_sharding(self._device)
        pinned_R = jax.device_put(empty_R, there, may_alias=False)
        self.fetch(sum(SIZES) * [0], sum(SIZES) * [pinned_R])

    def commit(self, slots: Sequence[int], staged: Sequence[jax.Array]) -> None:
        # A few programs, whatever the number: the last is written again.
        more = min(size for size in SIZES if size >= len(staged)) - len(staged)
        self._write([*slots, *more * [slots[-1]]], [*staged, *more * [staged[-1]]])

    def fetch(self, slots: Sequence[int], sources: Sequence[jax.Array]) -> None:
        """Puts blocks from pinned memory into rows; returns before they are there.

        Programs dispatched later read them. None travels twice: three blocks take a
        program of two and one of one.
        """
        first = 0
        while first < len(slots):
            end = first + max(size for size in SIZES if size <= len(slots) - first)
            self._write(slots[first:end], sources[first:end])
            first = end

    def _write(self, slots: Sequence[int], records: Sequence[jax.Array]) -> None:
        numbers = [self._number(slot) for slot in slots]
        self.array = _write(self.array, numbers, list(records))

    def _number(self, slot: int) -> jax.Array:
        number = self._numbers.get(slot)
        if number is None:
            number = jax.device_put(np.int32(slot), self._device)
            self._numbers[slot] = number
        return number


@partial(jax.jit, donate_argnums=0)
def _write(slots_SR, numbers: list[jax.Array], records: list[jax.Array]) -> jax.Array:
    update = jax.lax.dynamic_update_index_in_dim
    for number, record_R in zip(numbers, records, strict=True):
        record_R = jax.device_put(record_R, jax.memory.Space.Device)
        slots_SR = update(slots_SR, record_R, number, 0)
    return slots_SR
