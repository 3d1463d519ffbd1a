"""Bits of engines whose experts are the work of one opaque kernel, as on a GPU.

A callback takes the kernel's place: XLA can fuse nothing with it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.engine import layer_programs, programs
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.kernels import grouped, native, rows
from moe_edge.model import experts
from tests.support.layered import BLOCKS, StoreReader, forced_logits
from tests.support.tiny_models import ALL, random_prompts, random_weights

pytestmark = pytest.mark.slow
STEPS, LENGTHS = 6, (9,)
_calls: list[int] = []  # of the kernel: where its matrix begins


def product_on_host(
    x_TI,
    records_SR,
    first,
    blocks,
    tiles,
    outputs,
    *,
    source_P=None,
    combine=None,
    bias=None,
    scale_P=None,
):
    """`grouped.product`, row by row."""
    is_given = isinstance(outputs, jax.Array)
    P, O = outputs.shape if is_given else outputs  # noqa: E741
    if combine is not None:
        x_TI = combine(*jnp.split(x_TI, 2, axis=1))
    if source_P is None:
        source_P = jnp.zeros(P, jnp.int32) if len(x_TI) == 1 else jnp.arange(P)

    def compute(x_TI, source_P, records_SR, blocks, scale_P, out_PO):
        _calls.append(first)
        x_PI, records_SR = np.asarray(x_TI)[source_P], np.asarray(records_SR)
        width = x_PI.shape[1]
        empty_PO = np.full((P, O), np.nan, np.float32)
        out_PO = np.array(out_PO) if is_given else empty_PO
        for record, row, count in zip(*map(np.asarray, blocks), strict=True):
            record_R = records_SR[record]
            weight_OI = record_R[first : first + O * width].reshape(O, width)
            for each in range(row, row + count):
                y_O = weight_OI @ x_PI[each]
                if bias is not None:
                    y_O = y_O + record_R[bias : bias + O]
                out_PO[each] = y_O if scale_P is None else y_O * scale_P[each]
        return out_PO

    shape = jax.ShapeDtypeStruct((P, O), jnp.float32)
    given = blocks, scale_P, outputs if is_given else None
    return jax.pure_callback(compute, shape, x_TI, source_P, records_SR, *given)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(native, "suits", lambda rows, weights: False)
    monkeypatch.setattr(rows, "are_wanted", native.is_wanted)
    monkeypatch.setattr(grouped, "product", product_on_host)
    for module in (experts, programs, layer_programs):
        monkeypatch.setattr(module, "choose_method", lambda *_: "pairs")


@pytest.mark.parametrize("mode", ["layered", "fused"])
@pytest.mark.parametrize("name", ["gqa", "gpt_oss"])
def test_waves_have_the_bits_of_the_resident_engine(name, mode):
    prompts = random_prompts(ALL[name], LENGTHS)
    want = forced_logits(ResidentEngine(random_weights(ALL[name])), prompts, STEPS)
    # Fewer slots than a prompt's experts: it runs in waves.
    options = OffloadOptions(device_memory=f"{100 * 6 / BLOCKS}%", mode=mode)
    _calls.clear()
    with make_offloaded(StoreReader(ALL[name]), options) as engine:
        np.testing.assert_array_equal(forced_logits(engine, prompts, STEPS), want)
    assert len(set(_calls)) == 2 and len(_calls) > 4 * STEPS
