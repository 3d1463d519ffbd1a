"""A step that fetches ahead, as XLA schedules it for a GPU."""

import dataclasses
import importlib.util
import re

import pytest

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.kernels import native
from tests.support.tiny_models import ALL

if importlib.util.find_spec("jax_cuda12_plugin") is None:
    pytest.skip("needs jax-cuda12-plugin, see CONTRIBUTING.md", allow_module_level=True)

from tests.support.gpu_compiler import check_asks_no_host, decode_step_of, launches

pytestmark = pytest.mark.cuda
FEW, LOOK_UP = "moe_edge_few/pallas_call", "moe_edge_look_up/pallas_call"
START, WAIT = "moe_edge_prefetch_start", "moe_edge_prefetch_wait"


@pytest.mark.skipif(native.library() is None, reason="needs the host kernels")
@pytest.mark.parametrize("lengths", [(20,), (20, 3, 33)])
def test_a_layers_products_stand_between_start_and_wait(lengths):
    """Of three layers; and nobody copies slots or reads a flag on the host."""
    config = dataclasses.replace(ALL["gqa"], dense_layers=())
    options = OffloadOptions(
        device_memory="75%",
        **{"mode": "fused", "slot_plan": "equal", "zero_copy": True},
        **{"predictor": "stale_gate", "prefetch_in_fused": True},
    )

    text = decode_step_of(config, options, lengths)
    names = START, WAIT, LOOK_UP, FEW
    order = [name for line in launches(text) for name in names if re.search(name, line)]
    layer = [LOOK_UP, LOOK_UP, START, FEW, FEW, WAIT]
    assert order == [*layer, *layer, LOOK_UP, FEW, FEW]
    check_asks_no_host(text, config)
