"""A step whose absent experts the host helps with, as XLA schedules it for a GPU."""

import dataclasses
import importlib.util
import re

import pytest

from moe_edge.engine import fused
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.kernels import native
from moe_edge.offload.assist_base import AssistCosts
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
START, WAIT = "moe_edge_assist_start", "moe_edge_assist_wait"


@pytest.mark.skipif(native.library() is None, reason="needs the host kernels")
@pytest.mark.parametrize(
    "lengths, deferred, gpu",
    [((20,), False, H200), ((20, 3, 33), False, RTX_4090), ((20,), True, H200)],
)
def test_a_layers_products_stand_between_start_and_wait(
    lengths, deferred, gpu, monkeypatch
):
    """Of three layers; and nobody copies slots or reads a flag on the host."""
    even = AssistCosts(1.0, 1.0, 0.0)
    monkeypatch.setattr(fused, "measure_costs", lambda *given: even)
    config = dataclasses.replace(ALL["gqa"], dense_layers=())
    options = OffloadOptions(
        device_memory="75%",
        **{"mode": "fused", "slot_plan": "equal", "zero_copy": True},
        **{"assist": "two_pointer", "assist_in_fused": True},
        assist_deferred=deferred,
    )

    text = decode_step_of(config, options, lengths, gpu)
    names = START, WAIT, LOOK_UP, FEW
    order = [name for line in launches(text) for name in names if re.search(name, line)]
    layer = [START, LOOK_UP, FEW, FEW]
    if deferred:  # the next layer's, too
        assert order == [*layer, *layer, WAIT, *layer, WAIT, WAIT]
    else:
        assert order == 3 * [*layer, WAIT]
    check_asks_no_host(text, config)
