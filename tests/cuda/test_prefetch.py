"""A step that fetches ahead, as XLA schedules it for a GPU."""

import dataclasses
import importlib.util
import re

import pytest

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.kernels import native
from tests.support.layered import CAPACITY
from tests.support.tiny_models import ALL

if importlib.util.find_spec("jax_cuda12_plugin") is None:
    pytest.skip("needs jax-cuda12-plugin, see CONTRIBUTING.md", allow_module_level=True)

from tests.support.gpu_compiler import (
    H200,
    RTX_4090,
    check_asks_no_host,
    decode_step_of,
    launches,
)

pytestmark = pytest.mark.cuda
FEW, LOOK_UP = "moe_edge_few/pallas_call", "moe_edge_look_up/pallas_call"
START, WAIT = "moe_edge_prefetch_start", "moe_edge_prefetch_wait"
NAMES = START, WAIT, LOOK_UP, FEW
# What predictions cost a layer besides START and WAIT: the next router and its choice,
# `top_k` and what makes its scores and takes its ids.
MOST_MORE = 5


@pytest.mark.skipif(native.library() is None, reason="needs the host kernels")
@pytest.mark.parametrize("lengths, gpu", [((20,), H200), ((20, 3, 33), RTX_4090)])
def test_a_layers_products_stand_between_start_and_wait(lengths, gpu):
    """Of three layers; and nobody copies slots or tables, or reads a flag on the host.

    Both plans of a layer are one launch.
    """
    config = dataclasses.replace(ALL["gqa"], dense_layers=())
    given = {"mode": "fused", "slot_plan": "equal", "zero_copy": True}
    options = OffloadOptions(device_memory="75%", **given)
    more = {"predictor": "stale_gate", "prefetch_in_fused": True}
    ahead = dataclasses.replace(options, **more)

    plain = decode_step_of(config, options, lengths, gpu)
    text = decode_step_of(config, ahead, lengths, gpu)
    found = launches(text)
    order = [name for line in found for name in NAMES if re.search(name, line)]
    layer = [LOOK_UP, START, FEW, FEW, WAIT]
    assert order == [*layer, *layer, LOOK_UP, FEW, FEW]
    check_asks_no_host(text, config)
    tables = config.num_layers * config.moe.num_experts + 1
    assert not [line for line in found if f"s32[{tables}]{{0}} copy(" in line]
    more = len(found) - len(launches(plain))
    assert more <= 2 * (2 + MOST_MORE), found


@pytest.mark.skipif(native.library() is None, reason="needs the host kernels")
def test_a_look_at_a_partial_state_copies_neither_slots_nor_caches():
    """Its products and attention come before the look-up, one launch of both plans."""
    config = dataclasses.replace(ALL["gqa"], dense_layers=())
    given = {"mode": "fused", "slot_plan": "equal", "zero_copy": True}
    given |= {"predictor": "smoe_partial", "prefetch_in_fused": True}
    options = OffloadOptions(device_memory="75%", **given)
    text = decode_step_of(config, options, (20,), H200)
    found = launches(text)
    order = [name for line in found for name in NAMES if re.search(name, line)]
    layer = [FEW, FEW, LOOK_UP, START, FEW, FEW, WAIT]
    assert order == [*layer, *layer, LOOK_UP, FEW, FEW]
    check_asks_no_host(text, config)
    heads = config.attention.cache_heads
    assert f"f32[{heads},{CAPACITY}," in text
    assert not re.findall(rf"\[{heads},{CAPACITY},\d+\]\S* copy\S*\(", text)
