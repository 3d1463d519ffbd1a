"""A layer's experts on several devices: one device's bits, and no record is sent.

The devices are those that tests/conftest.py asks of JAX: cores of one machine.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.engine.mesh import local_mesh
from moe_edge.engine.programs import jit_step
from moe_edge.engine.sharded_experts import (
    counted_places,
    even_places,
    put_experts,
    run_sharded,
    slots_of,
)
from moe_edge.kernels import few, native
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from tests.support.gpu_kernels import interpreted_kernels
from tests.support.sharded import collectives
from tests.support.slow_cases import slow
from tests.support.tiny_models import BF16

E, D, F, K, DEVICES = 11, 40, 16, 3, 3
LAYOUT = RecordLayout(D, F)
RULE = {"activation": "silu", "swiglu_limit": None}
# By hand: experts in no order, and a device without any.
APART = np.array([[7, 0, 3, 9, 1, 4], [10, 2, E, 8, 6, 5], [E, E, E, E, E, E]])


def given(tokens: int, dtype):
    """Inputs, choices with padding tokens and rows of fewer experts, and records."""
    rng = np.random.default_rng(tokens)
    x_TD = rng.standard_normal((tokens, D), np.float32)
    ids_TK = rng.permuted(np.tile(np.arange(E), (tokens, 1)), axis=1)[:, :K]
    ids_TK[1, 1:], ids_TK[-2:] = E, E
    weights_TK = rng.random((tokens, K), np.float32)
    records_ER = rng.standard_normal((E, LAYOUT.size), np.float32) / 8
    if dtype == np.uint16:
        records_ER = (records_ER.view(np.uint32) >> 16).astype(np.uint16)
    return x_TD, ids_TK.astype(np.int32), weights_TK, records_ER


def sharded_run(places, jit=jit_step):
    mesh = local_mesh(len(places))
    return mesh, jit(
        functools.partial(run_sharded, mesh=mesh, layout=LAYOUT, **RULE),
    )


@pytest.mark.parametrize(
    ("jit", "tokens", "dtype"),  # XLA's kernels, and ours
    [
        (jax.jit, 7, np.uint16),
        (jit_step, 7, np.uint16),
        (jit_step, 40, np.float32),
        *slow((jax.jit, 40, np.float32)),
    ],
)
def test_sum_has_the_bits_of_one_device(jit, tokens, dtype):
    """7 tokens run as pairs, 40 in blocks, of which no device has a whole share."""
    *choice, records_ER = given(tokens, dtype)
    plain = jit(functools.partial(run_experts, layout=LAYOUT, **RULE))
    want = np.asarray(plain(*choice, records_ER))
    assert np.abs(want[:-2]).max() > 0.1 and not want[-2:].any()
    mesh, run = sharded_run(even_places(E, DEVICES), jit)
    for places in (even_places(E, DEVICES), APART):
        experts = put_experts(mesh, records_ER, places)
        np.testing.assert_array_equal(run(*mesh.put(choice), experts), want)
    moved = collectives(run.lower(*mesh.put(choice), experts).compile().as_text())
    if tokens == 7:
        assert moved == [("all-reduce", tokens * K * D)]
    else:
        share = -(-tokens // DEVICES)
        wanted = ("reduce-scatter", share * K * D), ("all-gather", share * DEVICES * D)
        assert moved == [*wanted]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens, dtype, form",
    [(7, BF16, "1"), (7, BF16, "cuda"), (40, np.float32, "1")],
)
def test_sum_by_a_gpus_kernels_has_the_bits_of_one_device(tokens, dtype, form):
    if form == "cuda" and native.library() is None:
        pytest.skip("needs the host kernels")
    *choice, records_ER = given(tokens, np.float32)
    records_ER = records_ER.astype(dtype)
    with interpreted_kernels("3") as patch:
        patch.setenv(few.VARIABLE, form)
        plain = jit_step(functools.partial(run_experts, layout=LAYOUT, **RULE))
        want = np.asarray(plain(*choice, jnp.asarray(records_ER)))
        mesh, run = sharded_run(even_places(E, DEVICES))
        experts = put_experts(mesh, records_ER, even_places(E, DEVICES))
        np.testing.assert_array_equal(run(*mesh.put(choice), experts), want)
    assert np.abs(want[:-2]).max() > 0.1


def test_sharded_records_alone_would_be_gathered():
    """What `shard_map` is for, and that `collectives` sees it where it is left out."""
    *choice, records_ER = given(7, np.float32)
    mesh = local_mesh(DEVICES)
    experts = put_experts(mesh, records_ER, even_places(E, DEVICES))
    plain = jit_step(functools.partial(run_experts, layout=LAYOUT, **RULE))
    text = plain.lower(*mesh.put(choice), experts.records_SR).compile().as_text()
    gathered = [size for name, size in collectives(text) if name == "all-gather"]
    assert gathered == [experts.records_SR.size]


def test_places_by_counts_share_the_uses_and_lose_no_expert():
    counts_E = np.array([90, 80, 70, 3, 2, 1, 0, 0, 0, 0, 0])
    places_NS = counted_places(counts_E, DEVICES)
    held = [set(own_S[own_S < E].tolist()) for own_S in places_NS]
    assert sorted(sum(map(list, held), [])) == [*range(E)]
    assert [len(own & {0, 1, 2}) for own in held] == [1, 1, 1]
    even = counts_E[even_places(E, DEVICES)[0]].sum()
    assert even == 243 > max(counts_E[[*own]].sum() for own in held) == 90


def test_places_are_even_and_complete():
    places_NS = even_places(E, DEVICES)
    assert places_NS.shape == (3, 4)
    assert places_NS.reshape(-1).tolist() == [*range(E), E]
    assert even_places(2, 4).reshape(-1).tolist() == [0, 1, 2, 2]
    slot_NE = slots_of(places_NS, E)
    held_NE = slot_NE < 4
    assert (held_NE.sum(axis=0) == 1).all() and held_NE.sum(axis=1).tolist() == [
        4,
        4,
        3,
    ]
    for device, expert in zip(*np.nonzero(held_NE), strict=True):
        assert places_NS[device, slot_NE[device, expert]] == expert
