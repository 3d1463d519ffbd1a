"""Mode fused whose host computes some absent experts: bits, counters and refusals."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine import fused
from moe_edge.engine.fused_assist import measure_costs, split_table
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_offload, make_offloaded
from moe_edge.kernels import few, native
from moe_edge.model.record import RecordLayout
from moe_edge.offload.assist_base import Assist, AssistCosts, get_assist
from tests.support.gpu_kernels import interpreted_kernels
from tests.support.layered import StoreReader
from tests.support.side_streams import beside_resident
from tests.support.tiny_models import ALL, BF16

STEPS = 6
EVEN = AssistCosts(1.0, 1.0, 0.0)
AHEAD = {"predictor": "stale_gate", "prefetch_in_fused": True, "slot_plan": "equal"}
needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)


@pytest.fixture(autouse=True)
def costs_are_even(monkeypatch):
    """CI also runs these tests where XLA multiplies; and what is split is known."""
    monkeypatch.setattr(native, "choice", lambda: "native")
    monkeypatch.setattr(fused, "measure_costs", lambda *given: EVEN)


def options_of(**options):
    given = {"mode": "fused", "device_memory": "50%"}
    given |= {"assist": "two_pointer", "assist_in_fused": True}
    return OffloadOptions(**given | options)


def run(name, dtype, lengths, **options):
    """Logits of the resident engine and of one that is helped; that engine, and what
    its streams were given."""
    config = dataclasses.replace(ALL[name], dense_layers=())
    reader = StoreReader(config, dtype=dtype)
    return beside_resident(reader, lengths, options_of(**options), STEPS)


def check_counters(engine, noted) -> int:
    """What was counted is what the shim saw; experts that the host computed."""
    computed = [int(line.split()[1]) for line in noted if line.startswith("computed")]
    report, moved = engine.report(), engine.moved()
    layers = len(engine.config.moe_layers)
    assert len(computed) == noted.count("assist calls the host") == STEPS * layers
    assert report["host_computed"] == sum(computed) > 0
    bytes_each = report["bytes_not_sent"] // sum(computed)
    misses = int(engine.counts().misses_L.sum())
    assert moved.demand_bytes == (misses - sum(computed)) * bytes_each > 0
    return sum(computed)


@needs_kernels
@pytest.mark.parametrize(
    "lengths, options",
    [
        ((9,), {}),
        ((9,), {"device_memory": "25%", "assist": "all"}),
        ((9, 4, 7), AHEAD),
        pytest.param((9, 4, 7), {"device_memory": "25%"}, marks=pytest.mark.slow),
        pytest.param((9, 4, 7), {"eviction": "lfu"}, marks=pytest.mark.slow),
        pytest.param((9,), {"eviction": "on_demand"}, marks=pytest.mark.slow),
        pytest.param((9,), {"eviction": "moe_infinity"}, marks=pytest.mark.slow),
        pytest.param((9,), AHEAD, marks=pytest.mark.slow),
        pytest.param((9,), {"device_memory": "25%"} | AHEAD, marks=pytest.mark.slow),
    ],
)
def test_a_step_has_the_bits_of_the_resident_engine(lengths, options):
    want, got, engine, noted = run("gqa", np.float32, lengths, **options)
    np.testing.assert_array_equal(got, want)
    assert engine.lossless and engine.report()["lossless"]
    check_counters(engine, noted)
    allowed = {"records", "waits", "copies", "calls", "launches"}
    for line in noted:  # the room apart, nothing but what streams do in turn
        of, does, *_ = [*line.split(), ""]
        streams = of in {"compute", "assist", "prefetch"} and does in allowed
        assert streams or of in {"computed", "copied"} or line == "allocates"
    assert noted.count("allocates") <= 1


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", [("gpt_oss", BF16), ("q4_0", np.float32)])
def test_bits_of_other_models(name, dtype):
    want, got, engine, noted = run(name, dtype, (9, 4))
    np.testing.assert_array_equal(got, want)
    check_counters(engine, noted)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths, form, options",
    [((9,), "1", {}), ((9, 4, 7), "1", {}), ((9, 4, 7), "cuda", AHEAD)],
)
def test_absent_experts_arrive_while_the_host_computes_others(lengths, form, options):
    """Kernels of a GPU, interpreted, sum otherwise than the host's: gate B."""
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, form)
        patch.setattr(few, "MISS_PROGRAMS", 3)
        options = {"zero_copy": True} | options
        want, got, engine, noted = run("gqa", BF16, lengths, **options)
        assert engine.report()["zero_copy"]
        check_counters(engine, noted)
    assert np.abs(got - want).max() / want.std() < 1e-5


@needs_kernels
def test_costs_are_measured():
    reader = StoreReader(ALL["gqa"])
    records = reader.experts(ALL["gqa"].moe_layers[0])
    costs = measure_costs(ALL["gqa"], jnp.asarray(records))
    assert 0 < costs.load_s < 1 and 0 < costs.host_s < 1 and costs.device_s == 0
    assert records.shape[1] == RecordLayout.of(ALL["gqa"]).size


@pytest.mark.parametrize(
    "rule, load_s, host_s, table",
    [
        ("two_pointer", 1.0, 1.0, [0, 0, 1, 1, 2, 2, 3]),
        ("two_pointer", 3.0, 1.0, [0, 0, 1, 2, 3, 3, 4]),
        ("two_pointer", 1.0, 9.0, [0, 0, 1, 1, 1, 1, 1]),
        ("fiddler", 2.0, 1.0, [0, 1, 2, 3, 4, 5, 6]),
        ("fiddler", 1.0, 2.0, [0] * 7),
        ("all", 1.0, 1.0, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_split_follows_the_rates(rule, load_s, host_s, table):
    costs = AssistCosts(load_s, host_s, 0.0)
    assert split_table(get_assist(rule), costs, 6) == table


def test_a_rule_that_takes_others_than_it_says_is_refused():
    class First(Assist):
        """The best one, whatever it says."""

        takes_last = True

        def take(self, absent, ids_TK, costs):
            return absent[:1]

    with pytest.raises(ConfigError, match=r"took experts \[0\] of 2 absent ones"):
        split_table(get_assist(First), EVEN, 3)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"mode": "layered"}, "the mode layered, where the host helps anyway"),
        ({"assist": None}, "the assist none; use assist two_pointer"),
        ({"assist": "two_front"}, "the assist two_front; use assist two_pointer"),
        ({"assist_expert_s": 0.1}, "assist_expert_s is 0.1, an emulated host's"),
        ({"assist_in_fused": False}, "mode fused has no assist; use mode layered"),
    ],
)
def test_what_does_not_go_together_is_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        options_of(**change)


def test_mode_auto_that_is_layered_is_refused():
    with pytest.raises(ConfigError, match="assist_in_fused is True and mode auto is"):
        check_offload(StoreReader(ALL["gqa"]), options_of(mode="auto"))
    assert options_of(mode="auto").choose_mode("gpu") == "fused"


@needs_kernels
def test_rows_whose_bits_may_not_depend_on_others_are_refused():
    with make_offloaded(StoreReader(ALL["gqa"]), options_of()) as engine:
        engine.check_rows()
        with pytest.raises(ConfigError, match=r"computed elsewhere \(assist\)"):
            engine.check_rows(deterministic=True)
