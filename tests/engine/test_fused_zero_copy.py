"""Experts that are computed while they arrive: bits, tables and refusals."""

import numpy as np
import pytest

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.kernels import few
from tests.support.gpu_kernels import interpreted_kernels
from tests.support.layered import BLOCKS, StoreReader, forced_logits
from tests.support.tiny_models import ALL, BF16, random_prompts, random_weights

STEPS = 6


def options_of(slots, **options):
    mode = {"mode": "fused", "zero_copy": True}
    return OffloadOptions(device_memory=f"{100 * slots / BLOCKS}%", **mode | options)


def check_bits(name, dtype, lengths, slots, steps=STEPS, **options):
    """Logits of the resident engine by the same kernel, and what the loop moves."""
    prompts = random_prompts(ALL[name], lengths)
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, "1")
        patch.setattr(few, "MISS_PROGRAMS", 3)
        resident = ResidentEngine(random_weights(ALL[name], dtype=dtype))
        want = forced_logits(resident, prompts, steps)
        moved = []
        for zero_copy in (True, False):
            given = options_of(slots, zero_copy=zero_copy, **options)
            with make_offloaded(StoreReader(ALL[name], dtype=dtype), given) as engine:
                got = forced_logits(engine, prompts, steps)
                assert engine.report()["zero_copy"] == zero_copy
                moved.append((engine.counts(), engine.moved()))
            np.testing.assert_array_equal(got, want)
    for one, other in zip(*moved, strict=True):
        np.testing.assert_array_equal(one, other)
    return moved[0][0]


def test_one_row():
    counts = check_bits("gqa", BF16, (9,), 8)
    assert (counts.misses_L[1:] > STEPS).all() and (counts.evictions_L[1:] > 4).all()


def test_biases():
    check_bits("gpt_oss", np.float32, (9,), 8)


@pytest.mark.parametrize("rows, slots", [(2, 7), (8, 14)])
def test_rows_that_share_absent_experts(rows, slots):
    # Eight rows choose 24 of 12 experts, which one layer's look-up drives out again.
    counts = check_bits("gqa", BF16, rows * (9,), slots)
    assert (counts.evictions_L[1:] > STEPS).all()
