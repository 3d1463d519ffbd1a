import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.slots import AliasedSlots, DonatedSlots, make_slots
from tests.support.slot_kinds import KINDS, on_cpu
from tests.support.slow_cases import slow

DTYPES = (np.float32, np.uint16)


@jax.jit
def read_row(slots_SR, slot):
    return jax.lax.dynamic_index_in_dim(slots_SR, slot, keepdims=False)


def random_record(rng, size, dtype):
    return rng.integers(0, 60000, size).astype(dtype)


@pytest.mark.parametrize("dtype", [*slow(DTYPES[0]), DTYPES[1]])
@pytest.mark.parametrize("kind", KINDS)
def test_thousand_writes_interleaved_with_jitted_reads(kind, dtype):
    rng, slots = np.random.default_rng(0), kind(7, 33, dtype)
    expected = np.zeros((7, 33), dtype)
    pointer = slots.array.unsafe_buffer_pointer()
    for _ in range(1000):
        slot, record = int(rng.integers(7)), random_record(rng, 33, dtype)
        slots.write(slot, record)
        expected[slot] = record
        record[:] = 1  # a reused staging buffer must not reach the slots
        read = int(rng.integers(7))
        got = np.asarray(read_row(slots.array, jnp.int32(read)))
        np.testing.assert_array_equal(got, expected[read])
    np.testing.assert_array_equal(np.array(slots.array), expected)
    assert slots.array.dtype == dtype and slots.num_bytes == expected.nbytes
    if kind is AliasedSlots:
        assert slots.array.unsafe_buffer_pointer() == pointer


@on_cpu
def test_aliased_array_is_one_object_in_shared_aligned_memory():
    slots = AliasedSlots(3, 5, np.float32)
    array = slots.array
    slots.write(2, np.full(5, 7, np.float32))
    assert slots.array is array and float(array[2, 4]) == 7
    assert array.unsafe_buffer_pointer() % 64 == 0
    assert slots.safe_in_thread and not DonatedSlots(3, 5, np.float32).safe_in_thread


def test_aliased_memory_that_jax_copied_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "device_put", lambda x, device, may_alias: jnp.array(x))
    with pytest.raises(RuntimeError, match="copied the slots instead of sharing"):
        AliasedSlots(3, 5, np.float32)


def test_donated_update_is_in_place():
    slots = DonatedSlots(64, 1024, np.float32)
    slots.write(0, np.ones(1024, np.float32))
    before, pointer = slots.array, slots.array.unsafe_buffer_pointer()
    slots.write(1, np.ones(1024, np.float32))
    assert before.is_deleted()
    assert slots.array.unsafe_buffer_pointer() == pointer


def test_donated_takes_pinned_blocks():
    slots = DonatedSlots(2, 4, np.float32)
    host = slots.array.sharding.with_memory_kind("pinned_host")
    slots.write(1, jax.device_put(np.arange(4, dtype=np.float32), host))
    np.testing.assert_array_equal(np.array(slots.array)[1], [0, 1, 2, 3])
    assert slots.array.sharding.memory_kind == "device"


@on_cpu
def test_make_slots_chooses_by_backend(monkeypatch):
    assert isinstance(make_slots(2, 4, np.float32), AliasedSlots)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert isinstance(make_slots(2, 4, np.float32), DonatedSlots)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sizes", "match"),
    [((0, 4), "number of slots .* got 0"), ((2, -1), "record size .* got -1")],
)
def test_rejects_bad_sizes(kind, sizes, match):
    with pytest.raises(ConfigError, match=match):
        kind(*sizes, np.float32)


def test_aliased_rejects_bfloat16():
    with pytest.raises(ConfigError, match="dtype bfloat16 .* bits as uint16"):
        AliasedSlots(2, 4, ml_dtypes.bfloat16)


@on_cpu
@pytest.mark.parametrize("bad", [np.zeros(3, np.float32), np.zeros(4, np.float16)])
def test_aliased_rejects_foreign_records(bad):
    slots = AliasedSlots(2, 4, np.float32)
    with pytest.raises((ValueError, TypeError)):
        slots.write(0, bad)
