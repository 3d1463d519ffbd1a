"""Kernels for experts in blocks of few bits compile for GPUs of a server and a desk."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from moe_edge.kernels import eights, few, native
from moe_edge.model.experts import run_experts
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout

if importlib.util.find_spec("jax_cuda12_plugin") is None:
    pytest.skip("needs jax-cuda12-plugin, see CONTRIBUTING.md", allow_module_level=True)

from tests.support.gpu_compiler import GPUS, Call, compile_all, launches

pytestmark = pytest.mark.cuda
ACT = functools.partial(activate, kind="silu", limit=None)
E, K, WIDTH, TRITON = 8, 3, 256, "__gpu$xla.gpu.triton"
HOST_MEMORY = "S(5)"
FEW, MANY = "moe_edge_few/pallas_call", "moe_edge_grouped/pallas_call"


@pytest.fixture(autouse=True)
def kernels_are_asked_for(monkeypatch):
    monkeypatch.setenv(eights.VARIABLE, "1")


@pytest.mark.parametrize(
    "kind, gpu",
    [*((kind, "H200") for kind in eights.FORMATS), ("q4_0x8", "RTX 4090")],
)
def test_a_layer_is_two_launches(kind, gpu):
    """At any number of rows, and where absent experts come from the host."""
    layout, calls = RecordLayout(WIDTH, 128, kind == "mxfp4x8", kind), []
    shape, pinned = jax.ShapeDtypeStruct, jax.devices("cpu")[0]
    pinned = jax.sharding.SingleDeviceSharding(pinned, memory_kind="pinned_host")
    records, host = (
        shape((E, layout.size), jnp.uint8, sharding=place) for place in (None, pinned)
    )

    def resident(x_TD, ids_TK, weights_TK, experts_ER):
        return run_experts(x_TD, ids_TK, weights_TK, experts_ER, layout)

    def absent(x_TD, ids_TK, host_TK, slots_SR, host_ER):
        rows = few.plan(ids_TK, E, host_TK)
        return few.ffn(x_TD, slots_SR, rows, K, layout, ACT, host_ER=host_ER)

    for tokens in (5, 40, 400):
        x_TD, ids_TK, weights_TK = _choice(tokens)
        args = x_TD, ids_TK, weights_TK, records
        calls.append(Call(native.within(resident), {}, args, {}))
        if tokens == 5:
            args = x_TD, ids_TK, ids_TK, records, host
            calls.append(Call(native.within(absent), {"donate_argnums": 3}, args, {}))
    names = FEW, FEW, MANY, MANY
    texts = compile_all(calls, GPUS[gpu])
    for name, text in zip(names, texts, strict=True):
        assert sum(name in launch for launch in launches(text)) == 2
        assert sum(TRITON in launch for launch in launches(text)) == 2
        # No copy makes words or scales of records.
        sizes = rf"\[{E},({layout.size}|{layout.size // 2}|{layout.size // 4})\]"
        assert not re.findall(rf"{sizes}\S* (copy\S*|fusion)\(", text)
    from_host = [HOST_MEMORY in text for text in texts]
    assert from_host == [False, True, False, False]


def test_sums_of_few_rows_do_not_need_their_kernel(monkeypatch):
    monkeypatch.setenv(few.VARIABLE, "0")
    layout = RecordLayout(WIDTH, 128, kind="q4_0x8")
    records = jax.ShapeDtypeStruct((E, layout.size), jnp.uint8)
    run = native.within(functools.partial(run_experts, layout=layout))
    (text,) = compile_all([Call(run, {}, (*_choice(5), records), {})])
    assert sum(MANY in launch for launch in launches(text)) == 2


def _choice(tokens: int):
    """(x_TD, ids_TK, weights_TK), their shapes."""
    shape, pairs = jax.ShapeDtypeStruct, (tokens, K)
    x_TD = shape((tokens, WIDTH), jnp.float32)
    return x_TD, shape(pairs, jnp.int32), shape(pairs, jnp.float32)
