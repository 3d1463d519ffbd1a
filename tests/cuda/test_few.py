"""How the kernel for few rows reads weights, in what XLA makes of it for a GPU."""

import functools
import importlib.util
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from moe_edge.kernels import few, few_floats, native
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout

if importlib.util.find_spec("jax_cuda12_plugin") is None:
    pytest.skip("needs jax-cuda12-plugin, see CONTRIBUTING.md", allow_module_level=True)

from tests.support.gpu_compiler import H200, RTX_4090, Call, ptx_of

pytestmark = pytest.mark.cuda
LAYOUT, K, ITEM, WIDE = RecordLayout(2048, 1024), 8, 2, 16  # bytes
ACT = functools.partial(activate, kind="silu", limit=None)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="it dumps no PTX")
@pytest.mark.parametrize("gpu, chip", [(H200, "sm_90"), (RTX_4090, "sm_89")])
def test_every_weight_is_loaded_once_by_sixteen_bytes(gpu, chip, tmp_path):
    """From its slot, or from the host and then stored there; of one token."""
    shape, pinned = jax.ShapeDtypeStruct, jax.devices("cpu")[0]
    pinned = jax.sharding.SingleDeviceSharding(pinned, memory_kind="pinned_host")
    slots_SR, host_ER = (
        shape((32, LAYOUT.size), jnp.bfloat16, sharding=place)
        for place in (None, pinned)
    )
    rows = few.Rows(*len(few.Rows._fields) * [shape((K,), jnp.int32)])
    args = shape((1, LAYOUT.d_model), jnp.float32), slots_SR, rows, host_ER

    def run(x_TD, slots_SR, rows, host_ER):
        return few.ffn(x_TD, slots_SR, rows, K, LAYOUT, ACT, host_ER=host_ER)

    call = Call(native.within(run), {"donate_argnums": 1}, args, {})
    found = ptx_of(call, tmp_path, gpu)
    shapes = {"moe_edge_few": (LAYOUT.d_model, 2)}  # gate and up
    shapes["moe_edge_few__1"] = LAYOUT.expert_dim, 1
    assert set(found) == set(shapes)
    for name, (width, matrices) in shapes.items():
        text = found[name]
        assert f".target {chip}" in text and ".local" not in text
        tile = few_floats.tile_of(width, matrices, ITEM)
        threads = 32 * tile.warps
        weights = tile.outputs * width * matrices * ITEM // (WIDE * threads)
        row = 4 * width // (WIDE * threads)
        moved = Counter(re.findall(r"\b((?:ld|st)\.global\S*)", text))
        # Two bodies: of what is absent and of what the slots hold.
        assert moved.pop("ld.global.v4.b32") == 2 * (weights + row)
        assert moved.pop("st.global.v4.b32") == weights
        # What is left is the plan's, and the outputs.
        assert set(moved) <= {"ld.global.b32", "st.global.b32"}
        assert moved["ld.global.b32"] <= 2 * len(rows) + 1
