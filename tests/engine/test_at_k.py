"""Operating points: one model at several K, with shared weights, slots, sessions."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.model.sub_experts import at_k, split_config
from tests.support.layered import CAPACITY, StoreReader, forced_logits
from tests.support.tiny_models import GQA, random_prompts

NINE = (9,)
SPLITS = {
    "linear": split_config(GQA, 2),
    "proxy": split_config(GQA, 2, gate="proxy_global", gate_neurons=3),
    "whole": GQA,
}


def resident(config) -> ResidentEngine:
    return ResidentEngine(load_weights(StoreReader(config)))


def logits(engine, steps=4):
    return np.asarray(forced_logits(engine, random_prompts(engine.config, NINE), steps))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("linear", "resident"),
        ("proxy", "layered"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("proxy", "resident"),
                ("whole", "resident"),
                ("linear", "layered"),
                ("whole", "layered"),
            )
        ),
    ],
)
def test_point_equals_an_engine_loaded_for_that_k(name, mode):
    config = SPLITS[name]
    if mode == "resident":
        engine = resident(config)
    else:
        options = OffloadOptions(device_memory="30%")
        engine = make_offloaded(StoreReader(config), options)
    own = logits(engine)
    two = logits(engine.at_k(2))
    np.testing.assert_array_equal(two, logits(resident(at_k(config, 2))))
    assert not np.array_equal(two, own)
    np.testing.assert_array_equal(logits(engine), own)  # and back again
    engine.close()


def test_points_share_weights_and_compile_nothing_when_switched():
    engine = resident(SPLITS["linear"])
    points = [engine.at_k(k) for k in (1, 4, 6)]
    assert points[2] is engine and points[0].at_k(6) is engine
    assert engine.at_k(None) is engine
    with pytest.raises(ConfigError, match="got True"):
        engine.at_k(True)
    assert points[0].weights.experts is engine.weights.experts
    first = [logits(point) for point in points]
    compiled = [point.num_compiled() for point in points]
    for point, expected in zip(points, first, strict=True):
        np.testing.assert_array_equal(logits(point), expected)
    assert [point.num_compiled() for point in points] == compiled


def test_session_goes_on_at_another_point():
    engine = resident(SPLITS["linear"])
    prompt = random_prompts(engine.config, NINE)
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, prompt)
    token, active = jnp.asarray([5], jnp.int32), jnp.ones(1, bool)
    switched = engine.at_k(2).decode(session, token, active)
    plain = engine.new_session(1, CAPACITY)
    engine.prefill(plain, prompt)
    assert not np.array_equal(switched, engine.decode(plain, token, active))
    assert np.isfinite(engine.decode(session, token, active)).all()


def test_points_of_a_layered_engine_share_slots():
    options = OffloadOptions(device_memory="100%")
    with make_offloaded(StoreReader(SPLITS["linear"]), options) as engine:
        logits(engine)
        engine.reset_records()
        logits(engine.at_k(4))
        assert engine.movement()["hit_ratio"] == 1.0


def test_points_of_a_layered_engine_count_rerouted_choices_together():
    options = OffloadOptions(
        device_memory="30%", route="substitute", route_options={"a": 0.5}
    )
    with make_offloaded(StoreReader(SPLITS["linear"]), options) as engine:
        point = engine.at_k(4)
        logits(engine, steps=2)
        logits(point, steps=3)
        report = point.report()
        assert report["choices"] == 2 * (2 * 6 + 3 * 4)  # 2 MoE layers
        assert engine.report() == report
        engine.reset_records()
        assert point.report()["choices"] == point.report()["rerouted"] == 0


def test_point_out_of_range_and_engines_of_one_point_are_refused():
    engine = resident(SPLITS["proxy"])
    with pytest.raises(ConfigError, match="sub-experts in 1..6, got 7"):
        engine.at_k(7)
    fused = OffloadOptions(device_memory="50%", mode="fused")
    with make_offloaded(StoreReader(GQA), fused) as engine:
        with pytest.raises(ConfigError, match="FusedEngine computes 3 experts a token"):
            engine.at_k(2)
    traced = make_offloaded(
        StoreReader(GQA), OffloadOptions(device_memory="50%"), with_trace=True
    )
    with traced, pytest.raises(ConfigError, match="a trace has one k"):
        traced.at_k(2)


@pytest.mark.parametrize("route", ["substitute", "drop"])
def test_lossy_route_over_a_proxy_gate_is_refused(route):
    options = OffloadOptions(device_memory="50%", route=route)
    with pytest.raises(ConfigError, match=f"route {route} compares router weights"):
        make_offloaded(StoreReader(SPLITS["proxy"]), options)


@pytest.mark.parametrize("predictor", ["stale_gate", "smoe_partial"])
def test_predictors_read_proxy_gates(predictor):
    options = OffloadOptions(device_memory="30%", predictor=predictor)
    config = SPLITS["proxy"]
    with make_offloaded(StoreReader(config), options) as engine:
        np.testing.assert_array_equal(logits(engine), logits(resident(config)))
        assert engine.movement()["hit_ratio"] > 0
        assert np.nanmax(engine.manager.predictor_run.accuracy.recall_LA) > 0
