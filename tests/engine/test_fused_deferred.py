"""Mode fused whose layers add what the host computed of the layer before: lossy."""

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine import fused
from moe_edge.engine.fused import FusedEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_generate import lossy_line
from moe_edge.kernels import few, native
from moe_edge.offload.assist_base import AssistCosts
from tests.support.gpu_kernels import interpreted_kernels
from tests.support.layered import StoreReader
from tests.support.side_streams import beside_resident
from tests.support.tiny_models import ALL, BF16

STEPS = 4
needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)


class FirstAlone(StoreReader):
    """Of whose layers only the first adds something, so it is the same a layer late."""

    def dense_layer(self, layer):
        arrays = super().dense_layer(layer)
        for name in ("attn.o", "shared.down"):
            arrays[name] = arrays[name] * (layer == 0)
        return arrays

    def experts(self, layer):
        return super().experts(layer) * (layer == 0)


@pytest.fixture(autouse=True)
def costs_are_even(monkeypatch):
    """CI also runs these tests where XLA multiplies; and what is split is known."""
    monkeypatch.setattr(native, "choice", lambda: "native")
    even = AssistCosts(1.0, 1.0, 0.0)
    monkeypatch.setattr(fused, "measure_costs", lambda *given: even)


def options_of(**options):
    given = {"mode": "fused", "device_memory": "50%", "assist": "all"}
    given |= {"assist_in_fused": True, "assist_deferred": True}
    return OffloadOptions(**given | options)


def run(reader_class, dtype=np.float32, lengths=(9,), **options):
    """Logits of the resident engine and of this one; it, and what its streams were
    given."""
    config = dataclasses.replace(ALL["gqa"], dense_layers=())
    given = reader_class(config, dtype=dtype), lengths, options_of(**options), STEPS
    want, got, engine, noted = beside_resident(*given)
    assert engine.report()["host_computed"] > 0
    return want, got, engine, noted


def apart(got, want) -> float:
    return np.abs(got - want).max() / want.std()


@needs_kernels
def test_rows_are_added_a_layer_later():
    """A START comes before the WAIT of the layer before; the last layer has both."""
    want, got, engine, noted = run(FirstAlone, lengths=(9, 4))
    assert apart(got, want) < 1e-5
    order = [line for line in noted if line in ("compute records", "compute waits")]
    start, wait = "compute records", "compute waits"
    assert order == STEPS * [start, start, wait, start, wait, wait]
    assert not engine.lossless and not engine.report()["lossless"]
    assert "lossy option assist_deferred (" in lossy_line(engine.report())


@needs_kernels
def test_what_stands_between_two_layers_does_not_see_them():
    want, got, *_ = run(StoreReader, assist="two_pointer")
    np.testing.assert_array_equal(got[0], want[0])  # a prompt waits for nothing
    assert 1e-3 < apart(got[1:], want[1:]) < 10


@needs_kernels
@pytest.mark.slow
def test_nothing_is_left_over_at_the_end_of_a_program(monkeypatch):
    """Programs of a layer each: every layer is the last one."""
    monkeypatch.setitem(FusedEngine.__init__.__kwdefaults__, "layers_per_program", 1)
    want, got, *_ = run(StoreReader, assist="two_pointer")
    np.testing.assert_array_equal(got, want)


@needs_kernels
@pytest.mark.slow
def test_absent_experts_arrive_while_the_host_computes_others():
    """Kernels of a GPU, interpreted."""
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, "1")
        patch.setattr(few, "MISS_PROGRAMS", 3)
        given = {"zero_copy": True, "assist": "two_pointer"}
        want, got, engine, _ = run(FirstAlone, BF16, (9, 4, 7), **given)
        assert engine.report()["zero_copy"]
    assert apart(got, want) < 1e-5


def test_it_is_lossy_and_of_the_assist_in_fused_alone():
    assert not options_of().lossless
    assert options_of(assist_deferred=False).lossless
    with pytest.raises(
        ConfigError, match="assist_deferred is True, which is of assist"
    ):
        options_of(assist_in_fused=False, mode="layered")
