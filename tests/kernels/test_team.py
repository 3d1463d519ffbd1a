"""The team of threads: many callers, changing sizes, fork, and too few threads."""

import functools
import os
import resource
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate
from moe_edge.engine.resident import ResidentEngine
from moe_edge.kernels import blocks, gradients, native, native_attention
from moe_edge.kernels.experts_at import ExpertsAt
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from tests.support.host_kernels import needs_kernels
from tests.support.tiny_models import GQA, random_prompts, random_weights

pytestmark = needs_kernels
SILU = functools.partial(activate, kind="silu", limit=None)


def case(layout, tokens=4, experts=8, chosen=4):
    """Arguments of `native.experts` up to its records."""
    rng = np.random.default_rng(0)
    x_TD = rng.normal(size=(tokens, layout.d_model)).astype(np.float32)
    ids_TK = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)])
    weights_TK = rng.random((tokens, chosen)).astype(np.float32)
    values = rng.normal(size=(experts, layout.unquantised.size)).astype(np.float32)
    records = values if layout.kind is None else [layout.encode(v) for v in values]
    return x_TD, ids_TK.astype(np.int32), weights_TK, np.stack(records)


def host_call(layout):
    """A call without a program: a child of fork has no JAX."""
    x_TD, ids_TK, weights_TK, records_ER = case(layout)
    run_at = ExpertsAt(list(records_ER), layout, "silu", None)
    return functools.partial(run_at, x_TD, ids_TK, weights_TK)


def copied(source):
    target = np.zeros_like(source)
    native.copy(target, source)
    return target


def all_calls():
    """Every kernel, large enough for several threads, by name."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def experts(kind):
        layout = RecordLayout(96, 96, False, kind)
        given = *case(layout), np.zeros((4, 96), np.float32)
        run = jax.jit(lambda *a: native.experts(*a[:4], layout, SILU, a[4]))
        return functools.partial(run, *given)

    attend = jax.jit(functools.partial(native_attention.attend, scale=0.2))
    start_B, window = np.array([3, 90, 50], np.int32), np.int32(1 << 30)
    x_TI, w_OI = normal(3, 256), normal(512, 256)
    q, k, v = normal(3, 4, 6, 32), normal(6, 128, 32), normal(6, 128, 32)
    train = jax.jit(functools.partial(gradients.attend, scale=0.2))
    norm = jax.jit(functools.partial(native.norm, eps=1e-5))
    linear = jax.jit(lambda *given: jnp.concatenate(native.linear(*given), axis=1))
    heads, keys = normal(6, 130, 32), normal(2, 130, 32)
    return {
        "train attend": functools.partial(train, heads, keys, keys, window),
        "linear": functools.partial(linear, x_TI, w_OI, w_OI[:40]),
        "norm": functools.partial(norm, normal(300, 256), normal(256)),
        "product": functools.partial(jax.jit(blocks.product), normal(40, 256), w_OI),
        "top_k": functools.partial(
            jax.jit(functools.partial(native.top_k, k=8)), normal(300, 256)
        ),
        "attend": functools.partial(attend, q, k, v, start_B, window),
        "experts": experts(None),
        "experts, q8_0": experts("q8_0"),
        "experts, q4_0": experts("q4_0"),
        "experts_at": host_call(RecordLayout(96, 96)),
        "copy": functools.partial(copied, normal(300_000)),
    }


@pytest.mark.slow
def test_many_calls_of_two_threads_while_the_team_changes():
    """Ten thousand, of all kernels; each result has the bits of a calm one."""
    calls = all_calls()
    wanted = {name: np.asarray(call()) for name, call in calls.items()}
    wrong = []

    def work(first):
        names = [*calls][first:] + [*calls][:first]
        for n in range(5000):
            name = names[n % len(names)]
            if not (np.asarray(calls[name]()) == wanted[name]).all():
                wrong.append((n, name))

    workers = [threading.Thread(target=work, args=(first,)) for first in (0, 3)]
    for worker in workers:
        worker.start()
    size = 0
    while any(worker.is_alive() for worker in workers):
        size = size % 6 + 1
        native.resize(size)
        workers[0].join(0.002)
    assert wrong == []


def test_two_engines_compute_at_once():
    engines = [ResidentEngine(random_weights(GQA)) for _ in range(2)]
    prompts = random_prompts(GQA, [5, 9])
    native.resize(3)
    wanted = generate(engines[0], prompts, 40).tokens
    found = {}

    def work(number):
        found[number] = [
            generate(engines[number], prompts, 40).tokens for _ in range(5)
        ]

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {0: [wanted] * 5, 1: [wanted] * 5}


def ends_well_in_a_child(function) -> bool:
    """Whether a child of fork finds that a function is true."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX's: a child calls nothing of it
def test_a_child_of_fork_computes_too():
    """Threads do not survive fork: the child gets a team of its own."""
    native.resize(3)
    call = host_call(RecordLayout(96, 96))
    wanted = call()
    assert ends_well_in_a_child(lambda: (call() == wanted).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork")
def test_fork_while_the_team_works():
    native.resize(3)
    call = host_call(RecordLayout(96, 96))
    wanted, over = call(), threading.Event()

    def work():
        while not over.is_set():
            call()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(20):
            assert ends_well_in_a_child(lambda: (call() == wanted).all())
    finally:
        over.set()
        worker.join()


@pytest.mark.filterwarnings("ignore:os.fork")
def test_where_no_thread_can_be_started_the_caller_computes_alone():
    native.resize(3)
    call = host_call(RecordLayout(96, 96))
    wanted = call()

    def without_memory_for_stacks():
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + (2 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        native.resize(256)  # more than the stacks that fork left behind
        return (call() == wanted).all()

    assert ends_well_in_a_child(without_memory_for_stacks)


@pytest.mark.parametrize("size", [0, 1, 4097, 3_000_001])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_copy_by_all_is_the_whole_array_and_nothing_beside_it(size, dtype):
    rng = np.random.default_rng(size)
    source = rng.integers(0, 256, size + 5).astype(dtype)[3:-2]  # unaligned
    whole = np.full(size + 2, 7, dtype)
    native.copy(whole[1:-1], source)
    np.testing.assert_array_equal(whole[1:-1], source)
    assert whole[0] == whole[-1] == 7


def test_a_copy_of_other_arrays_is_refused_or_done_by_one():
    target, source = np.zeros((4, 6), np.float32), np.ones((6, 4), np.float32)
    native.copy(target, source.T)  # not contiguous
    assert target.all()
    fixed = np.zeros(3, np.float32)
    fixed.flags.writeable = False
    for wrong in (source, np.ones((4, 6), np.float64)):
        with pytest.raises(ConfigError, match="two arrays alike, the first writeable"):
            native.copy(target, wrong)
    with pytest.raises(ConfigError, match="writeable"):
        native.copy(fixed, np.ones(3, np.float32))
