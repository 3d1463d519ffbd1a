"""START and WAIT on a CPU: what moves when, and what streams are given."""

import ctypes
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import native, nvrtc, prefetch, side_calls
from tests.support.side_streams import pinned, watching

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)
NONE = prefetch.NONE


@pytest.fixture(autouse=True)
def watched():
    yield from watching(prefetch.open_calls)


def records(rng, rows, width, dtype):
    return jnp.asarray(rng.integers(0, 100, (rows, width)), dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.uint8])
@pytest.mark.parametrize("width", [7, 64, 1024, 70_000])
def test_records_of_a_plan_enter_their_slots(width, dtype):
    rng = np.random.default_rng(0)
    host_ER, slots_SR = (records(rng, rows, width, dtype) for rows in (5, 4))
    want_SR = np.array(slots_SR)
    plan_2P = np.array([[4, NONE, 0, 2], [1, 3, 0, 2]], np.int32)
    want_SR[[1, 0, 2]] = np.asarray(host_ER)[[4, 0, 2]]

    @jax.jit
    def run(plan_2P, slots_SR, host_ER):
        plan_2P, slots_SR, _ = prefetch.start(plan_2P, slots_SR, host_ER)
        return prefetch.wait(plan_2P, slots_SR)[0]

    np.testing.assert_array_equal(run(plan_2P, slots_SR, pinned(host_ER)), want_SR)
    moved = 3 * width * jnp.dtype(dtype).itemsize
    assert f"copied {moved} bytes" in side_calls.watch(True)


def test_entries_that_do_not_exist_copy_nothing():
    plan_2P = np.array([[9, 1, 1, -7], [0, 2, -1, 1]], np.int32)
    slots_SR, host_ER = jnp.zeros((2, 16)), pinned(jnp.ones((2, 16)))

    @jax.jit
    def run(slots_SR, host_ER):
        plan, slots_SR, _ = prefetch.start(jnp.array(plan_2P), slots_SR, host_ER)
        return prefetch.wait(plan, slots_SR)[0]

    assert not run(slots_SR, host_ER).any()


def test_streams_wait_for_each_other_and_nobody_else():
    """START: ours waits for the program's, copies, marks the end; WAIT: the program's
    waits for that. Two prefetches under way do not mix."""
    plan_2P = jnp.array([[1], [0]], jnp.int32)
    host_ER = pinned(jnp.arange(32.0).reshape(2, 16))

    @jax.jit
    def run(one_SR, other_SR, host_ER, x):
        one, one_SR, (x,) = prefetch.start(plan_2P, one_SR, host_ER, [x])
        other, other_SR, (x,) = prefetch.start(plan_2P + 0, other_SR, host_ER, [x])
        x = jnp.sin(x) * 2
        other_SR, (x,) = prefetch.wait(other, other_SR, [x])
        one_SR, (x,) = prefetch.wait(one, one_SR, [x])
        return one_SR, other_SR, x

    given = jnp.zeros((1, 16)), jnp.zeros((1, 16)), host_ER, jnp.arange(3.0)
    one_SR, other_SR, x = run(*given)
    np.testing.assert_array_equal(one_SR, np.arange(16, 32.0)[None])
    np.testing.assert_array_equal(other_SR, one_SR)
    np.testing.assert_allclose(x, np.sin(np.arange(3.0)) * 2, rtol=1e-6)
    begins = ["compute records", "prefetch waits", "prefetch launches"]
    begins.append("prefetch records")
    ends = ["compute waits", "copied 64 bytes"]
    assert side_calls.watch(True) == 2 * begins + 2 * ends


def test_what_is_under_way_is_not_there_before_the_wait():
    """Two programs, so that slots are seen between the calls; donated, so in place."""
    start = jax.jit(lambda *given: prefetch.start(*given)[:2], donate_argnums=(0, 1))
    wait = jax.jit(lambda *given: prefetch.wait(*given)[0], donate_argnums=1)
    plan_2P, slots_SR = jnp.array([[0], [1]], jnp.int32), jnp.zeros((2, 16))
    host_ER = pinned(jnp.ones((1, 16)))
    plan_2P, slots_SR = jax.block_until_ready(start(plan_2P, slots_SR, host_ER))
    seen = ctypes.string_at(slots_SR.unsafe_buffer_pointer(), slots_SR.nbytes)
    assert not np.frombuffer(seen, np.float32).any()
    assert "copied" not in "".join(side_calls.watch(True))
    np.testing.assert_array_equal(wait(plan_2P, slots_SR)[:, 0], [0, 1])


def test_a_wait_without_a_start_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="nothing was started for"):
        jax.jit(prefetch.wait)(jnp.zeros((2, 1), jnp.int32), jnp.zeros((1, 16)))


def test_a_plan_that_has_moved_is_refused():
    @jax.jit
    def run(slots_SR, host_ER):
        plan_2P = jnp.zeros((2, 1), jnp.int32)
        plan_2P, slots_SR, _ = prefetch.start(plan_2P, slots_SR, host_ER)
        return prefetch.wait(plan_2P + 1, slots_SR)[0], plan_2P

    with pytest.raises(jax.errors.JaxRuntimeError, match="the plan has moved"):
        jax.block_until_ready(run(jnp.zeros((1, 16)), pinned(jnp.ones((1, 16)))))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_programs_that_fail_before_their_wait_leave_no_events(elsewhere):
    """Begun 200 times and never waited for, in the same slots or always in others."""
    start = jax.jit(lambda *given: prefetch.start(*given)[:2], donate_argnums=(0, 1))
    host_ER, given = pinned(jnp.ones((1, 16))), []
    for _ in range(200):
        if not given or elsewhere:
            plan_2P, slots_SR = jnp.array([[0], [0]], jnp.int32), jnp.zeros((1, 16))
        plan_2P, slots_SR = jax.block_until_ready(start(plan_2P, slots_SR, host_ER))
        given.append((plan_2P, slots_SR))
        if len(given) == 100:
            made = side_calls.events_made()
    assert side_calls.events_made() == made
    # The last one is whole all the same.
    wait = jax.jit(lambda *given: prefetch.wait(*given)[0], donate_argnums=1)
    assert wait(*given[-1]).all()


@pytest.mark.parametrize(
    "plan, slots, host",
    [
        ((3, 1), ((1, 16), jnp.float32), ((1, 16), jnp.float32)),
        ((2, 1), ((1, 16), jnp.float32), ((1, 8), jnp.float32)),
        ((2, 1), ((1, 16), jnp.float32), ((1, 16), jnp.bfloat16)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(plan, slots, host):
    given = jnp.zeros(plan, jnp.int32), jnp.zeros(*slots), pinned(jnp.zeros(*host))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"expected plan \[2, P\]"):
        jax.block_until_ready(jax.jit(lambda *arrays: prefetch.start(*arrays))(*given))


def test_only_calls_that_do_not_wait_for_a_device_are_opened():
    source = (nvrtc.SOURCES / "cuda_calls.h").read_text()
    opened = set(re.findall(r'\{"(cu\w+)", &', source))
    assert opened == {
        *("cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
        *("cuStreamCreate", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"),
        *("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"),
        *("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchHostFunc"),
        "cuMemHostAlloc",  # of the first step of a size
    }


def test_without_the_host_kernels_it_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        with pytest.raises(ConfigError, match=r"needs the C\+\+ kernels"):
            prefetch.open_calls.__wrapped__()


def test_a_machine_without_nvrtc_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "NAMES", ("libnvrtc_none.so",))
    with pytest.raises(ConfigError, match=r"no NVRTC .* pip install \"jax\[cuda12\]\""):
        nvrtc.compile_cuda("prefetch.cu", "9.0")
