"""A prompt whose experts travel while others are computed, as XLA schedules it."""

import dataclasses
import importlib.util
import re

import ml_dtypes
import numpy as np
import pytest

from moe_edge.engine.fused_turns import PARTS
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.kernels import native
from tests.support.layered import StoreReader
from tests.support.tiny_models import ALL, MOE_ONLY, random_prompts

if importlib.util.find_spec("jax_cuda12_plugin") is None:
    pytest.skip("needs jax-cuda12-plugin, see CONTRIBUTING.md", allow_module_level=True)

from tests.support.gpu_compiler import (
    GPUS,
    check_asks_no_host,
    check_copies_no_slots,
    compile_all,
    launches,
    programs_of,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(native.library() is None, reason="needs the host kernels"),
]
PRODUCT = "moe_edge_grouped/pallas_call"
START, WAIT = "moe_edge_prefetch_start", "moe_edge_prefetch_wait"
LOOK_UP = 10  # launches, at least
NAMES = START, WAIT, PRODUCT


def prompt_program_of(config, dtype, options, target) -> str:
    """The text of the last layer's program, for a prompt of 40 tokens."""

    def run():
        with make_offloaded(StoreReader(config, dtype=dtype), options) as engine:
            session = engine.new_session(1, 64)
            engine.prefill(session, random_prompts(config, (40,)))

    *_, last = (call for call in programs_of(run) if "_layer_step" in f"{call}")
    (text,) = compile_all([last], target)
    return text


@pytest.mark.parametrize(
    "gpu, slot_plan, share, waves",
    [
        ("H200", "equal", "50%", 2),
        ("RTX 4090", "equal", "25%", 4),
        ("RTX 4090", "one_pool", "100%", 1),
    ],
)
def test_a_turns_products_stand_between_start_and_wait(gpu, slot_plan, share, waves):
    """And nobody copies slots, or reads a flag on the host."""
    # One kind of layers: the program that runs all of them.
    attention = dataclasses.replace(MOE_ONLY.attention, windows=())
    config = dataclasses.replace(MOE_ONLY, attention=attention)
    given = {"mode": "fused", "overlap_in_fused": True, "zero_copy": True}
    options = OffloadOptions(device_memory=share, slot_plan=slot_plan, **given)

    text = prompt_program_of(config, ml_dtypes.bfloat16, options, GPUS[gpu])
    found = launches(text)
    order = [name for line in found for name in NAMES if re.search(name, line)]
    turn = [START, PRODUCT, PRODUCT, WAIT]
    assert order == PARTS * waves * turn + [PRODUCT, PRODUCT]
    check_asks_no_host(text, config)
    # Waves are looked up between every other START and its WAIT, behind which the next
    # START stands at once.
    at = [i for i, line in enumerate(found) if re.search(f"{START}|{WAIT}", line)]
    starts, waits = at[::2], at[1::2]
    assert [then + 1 for then in waits[:-1]] == starts[1:]
    between = [then - first for first, then in zip(starts, waits, strict=True)]
    assert all(each > LOOK_UP for each in between[: PARTS * (waves - 1) : PARTS])
    copy = r"(wrapped_slice|fused_dynamic_update_slice|fused_pad)"
    copied = rf"f32\[\d+,{config.d_model}\]\S* fusion\(.*calls=%{copy}"
    assert not [line for line in found if re.search(copied, line)], "of rows"


def test_loops_of_quantised_experts_copy_no_slots():
    """A START fills what its WAIT is given: a copy between them would be another."""
    config = ALL["q4_0"]
    options = OffloadOptions(device_memory="50%", mode="fused", overlap_in_fused=True)
    text = prompt_program_of(config, np.float32, options, GPUS["H200"])
    assert START in text and " while(" in text
    check_copies_no_slots(text, config)
