"""Device slots: one array [S, R], a row holds the record of one expert block.

Programs take `slots.array` as an argument in every call and never close over it. How
a row is written depends on the backend; `make_slots` chooses.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError, check_count

_ALIGNMENT = 64  # bytes; JAX aliases host memory only at this alignment


class AliasedSlots:
    """Slots in host memory that JAX and NumPy share (CPU only).

    A write is one memcpy, from any thread, while programs read other rows; `array`
    [S, R] is one and the same jax array for ever, so nothing waits for it.

    Contract: a row may be written only while no dispatched and unfinished program may
    read that row. JAX cannot check this: it takes arrays as constant. The array must
    never be donated, and a NumPy view of it changes with the next write.

    Args:
      device: whose array it is; None: the default one, as nobody states.
    """

    safe_in_thread = True  # `write` may be called by a thread other than the engine's
    max_staged = 1  # blocks that wait next to the slots; here none is ever staged

    def __init__(
        self,
        num_slots: int,
        record_size: int,
        dtype: np.dtype,
        device: jax.Device | None = None,
    ):
        dtype = _check_sizes(num_slots, record_size, dtype)
        if dtype.kind not in "fiu":
            raise ConfigError(
                f"slots cannot share dtype {dtype.name} with NumPy; keep its bits as "
                f"uint{8 * dtype.itemsize}"
            )
        self.num_slots = num_slots
        self.num_bytes = num_slots * record_size * dtype.itemsize
        raw = np.empty(self.num_bytes + _ALIGNMENT, np.uint8)
        raw.fill(0)  # touches the pages now, not in the first writes
        first = -raw.ctypes.data % _ALIGNMENT
        aligned = raw[first : first + self.num_bytes]
        self._host_SR = aligned.view(dtype).reshape(num_slots, record_size)
        # Not by dlpack, whose arrays have a stated device: what is computed from them
        # has one too, and a program's second call would compile again.
        self.array = jax.device_put(self._host_SR, device, may_alias=True)
        if self.array.unsafe_buffer_pointer() != self._host_SR.ctypes.data:
            raise RuntimeError(
                "JAX copied the slots instead of sharing them; use DonatedSlots"
            )

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def write(self, slot: int, record_R: np.ndarray) -> None:
        """Copies a record into a row; see the contract above."""
        np.copyto(self._host_SR[slot], record_R, casting="no")

    def row(self, slot: int) -> np.ndarray:
        """The row itself [R], for a writer of its own; see the contract above."""
        return self._host_SR[slot]

    def read(self, slot: int) -> np.ndarray:
        """A copy of a row."""
        return self._host_SR[slot].copy()

    def recover(self) -> None:
        """Nothing can take this memory."""


class DonatedSlots:
    """Slots on any device, written by a donated in-place update.

    `stage` may run in any thread; `commit` and `write` replace `array`, so they
    belong to the thread that dispatches the programs. A donated update waits in the
    device's queue for programs that still read the array (on a CPU, dispatching it
    blocks). A live NumPy view of `array` turns every update into a full copy.
    `array` is a new object after every write.
    """

    safe_in_thread = False
    max_staged = 4  # the budget must leave room for them
    gathers = False  # whether a wait commits all that it waits for at once

    def __init__(
        self,
        num_slots: int,
        record_size: int,
        dtype: np.dtype,
        device: jax.Device | None = None,
    ):
        dtype = _check_sizes(num_slots, record_size, dtype)
        self.num_slots, self._device = num_slots, device
        self.array = jnp.zeros((num_slots, record_size), dtype, device=device)
        self.num_bytes = self.array.nbytes

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def stage(self, sources: Sequence[np.ndarray | jax.Array]) -> list[jax.Array]:
        """Blocks on the device, arrived; never views of `sources`."""
        # All are asked for before the first is waited for: the link never rests.
        return jax.block_until_ready([self._put(source_R) for source_R in sources])

    def _put(self, source_R) -> jax.Array:
        if jax.default_backend() == "cpu" and isinstance(source_R, np.ndarray):
            # device_put would alias
            return jnp.array(source_R, device=self._device)
        return jax.device_put(source_R, self.array.sharding)

    def commit(self, slots: Sequence[int], staged: Sequence[jax.Array]) -> None:
        """Puts up to `max_staged` staged records into rows."""
        # One program, whatever their number: the last is written again.
        more = self.max_staged - len(staged)
        slot_N = np.array([*slots, *more * [slots[-1]]], np.int32)
        self.array = _update(self.array, slot_N, *staged, *more * [staged[-1]])

    def write(self, slot: int, source_R: np.ndarray | jax.Array) -> None:
        """Copies a block into a row."""
        self.commit([slot], self.stage([source_R]))

    def read(self, slot: int) -> np.ndarray:
        """A copy of a row on the host."""
        return np.array(_row(self.array, jax.device_put(np.int32(slot))))

    def recover(self) -> None:
        """Memory again, where an error has taken it; what it held is lost."""
        if is_lost(self.array):
            shape, dtype = self.array.shape, self.array.dtype
            self.array = jnp.zeros(shape, dtype, device=self._device)


Slots = AliasedSlots | DonatedSlots


def make_slots(
    num_slots: int,
    record_size: int,
    dtype: np.dtype,
    elsewhere: type[DonatedSlots] = DonatedSlots,
    device: jax.Device | None = None,
) -> Slots:
    """S slots for records of R elements: shared memory on a CPU, else `elsewhere`."""
    kind = AliasedSlots if jax.default_backend() == "cpu" else elsewhere
    return kind(num_slots, record_size, dtype, device)


def is_lost(tree) -> bool:
    """Whether arrays were donated to a program that failed; waits for them."""
    try:
        jax.block_until_ready(tree)
    except RuntimeError:  # deleted, or what was to compute them has failed
        return True
    return False


def _check_sizes(num_slots: int, record_size: int, dtype: np.dtype) -> np.dtype:
    check_count("number of slots", num_slots)
    check_count("record size", record_size)
    return np.dtype(dtype)


@partial(jax.jit, donate_argnums=0)
def _update(slots_SR: jax.Array, slot_N: jax.Array, *records: jax.Array) -> jax.Array:
    update = jax.lax.dynamic_update_index_in_dim
    for number, record_R in enumerate(records):
        slots_SR = update(slots_SR, record_R, slot_N[number], 0)
    return slots_SR


@jax.jit
def _row(slots_SR: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(slots_SR, slot, keepdims=False)
