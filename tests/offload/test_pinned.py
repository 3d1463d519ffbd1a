"""XLA's limit on pinned host memory: set before JAX starts, refused afterwards."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError
from moe_edge.engine import load, offloaded
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload import pinned
from moe_edge.offload.pinned import (
    VARIABLE,
    check_limit,
    needed_gib,
    pinned_gib,
    raise_limit,
)
from tests.support.layered import StoreReader
from tests.support.tiny_models import GQA

GIB, MIB = 1 << 30, 1 << 20
PINNED = OffloadOptions(memory="pinned")


gib_pinned_now = pinned.gib_pinned_now


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that it is as before after the test
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(pinned, "_set_here", None)
    # Engines of tests before these may have pinned some.
    monkeypatch.setattr(pinned, "gib_pinned_now", lambda: 0)


def large_reader(block_bytes=GIB // 8, layers=40, experts=16, dtype=np.float32):
    """As an open checkpoint of 80 GiB of experts says it."""
    layout = SimpleNamespace(
        num_bytes=lambda kept: block_bytes * kept.itemsize // np.dtype(dtype).itemsize
    )
    moe = SimpleNamespace(num_experts=experts)
    config = SimpleNamespace(moe_layers=range(layers), moe=moe)
    return SimpleNamespace(config=config, layout=layout, dtype=np.dtype(dtype))


class Regions:
    """XLA's allocator as far as it grows: every array where there is room, no end."""

    def __init__(self, limit):
        self.limit, self.free, self.taken, self.size = limit, [], 0, 2 * MIB

    def add(self, each):
        for i, room in enumerate(self.free):
            if room >= each:
                self.free[i] -= each
                return True
        left, grown = self.limit - self.taken, False
        while self.size < each:
            self.size, grown = 2 * self.size, True
        region = min(self.size, left)
        if region < each:
            return False
        self.size *= 1 if grown else 2
        self.taken += region
        self.free.append(region - each)
        return True


@pytest.mark.parametrize(
    ("count", "each"),
    [
        (1, 1000),
        (640, 128 * MIB),
        (40, 2 * GIB),
        (60, 3500 * MIB),
        (7, 33 * GIB),
        (5000, 14 * MIB + 64),
    ],
)
def test_the_limit_holds_all_arrays_and_little_more(count, each):
    gib = needed_gib(count, each)
    regions = Regions(gib * GIB)
    assert all(regions.add(-(-each // 256) * 256) for _ in range(count))
    assert regions.taken - count * each < 3 * GIB + 8 * each  # ends of regions


def test_what_is_pinned_follows_memory_and_mode():
    reader = large_reader()
    assert pinned_gib(reader, OffloadOptions(), "layered") == 0
    assert pinned_gib(reader, OffloadOptions(), "fused") == needed_gib(40, 2 * GIB) > 80
    assert pinned_gib(reader, PINNED, "layered") == needed_gib(640, GIB // 8) > 80
    half = large_reader(block_bytes=GIB // 16, dtype=np.float16)  # kept as float32
    assert pinned_gib(half, PINNED, "layered") == needed_gib(640, GIB // 8)
    bits = large_reader(dtype=ml_dtypes.bfloat16)
    assert pinned_gib(bits, PINNED, "layered") == needed_gib(640, GIB // 8)
    assert pinned_gib(large_reader(layers=0), PINNED, "layered") == 0


@pytest.mark.parametrize(
    ("started", "before", "gib", "after"),
    [
        (False, None, 84, "84"),
        (False, None, 64, None),  # the default is enough
        (False, "70", 84, "70"),  # somebody's choice
        (True, None, 84, None),  # too late
    ],
)
def test_the_limit_is_set_before_jax_starts(monkeypatch, started, before, gib, after):
    monkeypatch.setattr(pinned, "backends_are_initialized", lambda: started)
    if before:
        monkeypatch.setenv(VARIABLE, before)
    raise_limit(gib)
    assert os.environ.get(VARIABLE) == after


def test_a_limit_set_for_a_smaller_model_is_raised(monkeypatch):
    monkeypatch.setattr(pinned, "backends_are_initialized", lambda: False)
    for gib, after in ((84, "84"), (100, "100"), (90, "100")):
        raise_limit(gib)
        assert os.environ[VARIABLE] == after
    monkeypatch.setenv(VARIABLE, "70")  # somebody's choice after all
    raise_limit(120)
    assert os.environ[VARIABLE] == "70"
    monkeypatch.setenv(VARIABLE, "100")
    monkeypatch.setattr(pinned, "backends_are_initialized", lambda: True)
    raise_limit(120)  # too late
    assert os.environ[VARIABLE] == "100"


def test_what_engines_have_pinned_counts(monkeypatch):
    """Two of 40 GiB each passed, and took 80 GiB of 64 together."""
    monkeypatch.setattr(pinned, "gib_pinned_now", lambda: 40)
    check_limit(24, "gpu")
    message = f"40 GiB .* next to 40 GiB that .* its default .* export {VARIABLE}=80"
    with pytest.raises(CapacityError, match=message):
        check_limit(40, "gpu")
    # An engine that is gone, but not collected yet, does not count.
    found = iter((40, 0))
    monkeypatch.setattr(pinned, "gib_pinned_now", lambda: next(found))
    check_limit(40, "gpu")


def test_arrays_in_pinned_memory_are_counted(monkeypatch):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = [
        SimpleNamespace(nbytes=GIB, sharding=sharding.with_memory_kind(kind))
        for kind in ("pinned_host", "pinned_host", "device")
    ]
    arrays.append(jax.device_put(np.ones(3), arrays[0].sharding))
    assert any(array is arrays[-1] for array in jax.live_arrays())
    monkeypatch.setattr(jax, "live_arrays", lambda: arrays)
    assert gib_pinned_now() == 3


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "its default of 64 GiB"),
        ("83", f"{VARIABLE}=83"),
        ("many", f"{VARIABLE}=many"),
    ],
)
def test_a_smaller_limit_is_refused_with_the_line_to_set(monkeypatch, given, why):
    if given:
        monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(
        CapacityError, match=f"84 GiB .* {why}; .* export {VARIABLE}=84"
    ):
        check_limit(84, "gpu")
    check_limit(84, "cpu")
    check_limit(0, "gpu")
    monkeypatch.setenv(VARIABLE, "84")
    check_limit(84, "gpu")


def test_an_engine_of_pinned_experts_is_refused_before_loading(monkeypatch):
    reader = StoreReader(GQA)
    reader.top = reader.read_experts = None  # not to be read
    monkeypatch.setattr(offloaded, "pinned_gib", lambda *_: 84)
    monkeypatch.setattr(offloaded.jax, "default_backend", lambda: "gpu")
    for check in (offloaded.check_offload, offloaded.make_offloaded):
        with pytest.raises(CapacityError, match=f"export {VARIABLE}=84"):
            check(reader, PINNED)


def test_a_check_sets_the_limit_before_it_starts_jax(monkeypatch):
    """A dry run accepts what the run accepts; a study is checked before it runs."""
    started = []
    monkeypatch.setattr(pinned, "backends_are_initialized", lambda: bool(started))
    monkeypatch.setattr(pinned, "pinned_gib", lambda *_: 84)
    monkeypatch.setattr(offloaded, "pinned_gib", lambda *_: 84)
    monkeypatch.setattr(
        offloaded.jax, "default_backend", lambda: started.append(1) or "gpu"
    )
    monkeypatch.setattr(load, "open_checkpoint", lambda path: StoreReader(GQA))
    for _ in range(2):
        load.check_checkpoint("large", with_tokenizer=False, offload=PINNED)
    assert started and os.environ[VARIABLE] == "84"


def test_loading_sets_the_limit_for_modes_that_pin(monkeypatch):
    monkeypatch.setattr(pinned, "backends_are_initialized", lambda: False)
    monkeypatch.setattr("moe_edge.engine.inline.run_inline", lambda offload: None)
    load.prepare_process(large_reader(), OffloadOptions(mode="layered"))
    load.prepare_process(large_reader(), None)
    assert VARIABLE not in os.environ
    load.prepare_process(large_reader(), OffloadOptions())  # auto: fused on a GPU
    assert os.environ[VARIABLE] == str(needed_gib(40, 2 * GIB))


@pytest.mark.slow
def test_a_fresh_process_sets_it_once():
    """With JAX itself: what loading imports must not have started it."""
    code = f"""
import os
from moe_edge.engine import load, offloaded
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.pinned import raise_limit
raise_limit(84)
print(os.environ["{VARIABLE}"])
import jax
jax.devices()
del os.environ["{VARIABLE}"]
raise_limit(84)
print(os.environ.get("{VARIABLE}"))
"""
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["84", "None"], done.stderr
