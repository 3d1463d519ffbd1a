"""Operating points: one model at several K, with shared weights, slots, sessions."""

import functools

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.model.sub_experts import at_k, split_config
from tests.support.layered import CAPACITY, StoreReader, forced_logits
from tests.support.slow_cases import slow
from tests.support.tiny_models import GQA, MOE_ONLY, random_prompts

NINE = (9,)
SPLIT = split_config(MOE_ONLY, 2, gate="proxy_global", gate_neurons=3)


@functools.cache
def loaded(k: int) -> ResidentEngine:
    return ResidentEngine(load_weights(StoreReader(at_k(SPLIT, k))))


def resident() -> ResidentEngine:
    return loaded(6)


def layered(**options):
    # One budget for all: its slots are a shape.
    options = OffloadOptions(device_memory="30%", **options)
    return make_offloaded(StoreReader(SPLIT), options)


def logits(engine, steps=4):
    return np.asarray(forced_logits(engine, random_prompts(engine.config, NINE), steps))


@pytest.mark.parametrize("make", [*slow(resident), layered])
def test_point_equals_an_engine_loaded_for_that_k(make):
    with make() as engine:
        own = logits(engine)
        two = logits(engine.at_k(2))
        np.testing.assert_array_equal(two, logits(loaded(2)))
        assert not np.array_equal(two, own)
        np.testing.assert_array_equal(logits(engine), own)  # and back again


def test_points_share_weights_and_compile_nothing_when_switched():
    engine = resident()
    points = [engine.at_k(k) for k in (2, 6)]
    assert points[1] is engine and points[0].at_k(6) is engine
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
    engine = resident()
    prompt = random_prompts(engine.config, NINE)
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, prompt)
    token, active = jax.device_put((np.array([5], np.int32), np.ones(1, bool)))
    switched = engine.at_k(2).decode(session, token, active)
    plain = engine.new_session(1, CAPACITY)
    engine.prefill(plain, prompt)
    assert not np.array_equal(switched, engine.decode(plain, token, active))
    assert np.isfinite(engine.decode(session, token, active)).all()


def test_points_of_a_layered_engine_share_slots():
    with layered() as engine:
        prompt = random_prompts(engine.config, NINE)
        sessions = [engine.new_session(1, CAPACITY) for _ in range(2)]
        for session in sessions:
            engine.prefill(session, prompt)
        token, active = jax.device_put((np.array([5], np.int32), np.ones(1, bool)))
        engine.decode(sessions[0], token, active)  # 12 sub-experts in 14 slots
        engine.reset_records()
        engine.at_k(2).decode(sessions[1], token, active)
        # The first layer's two are among its six; the second one's input differs.
        assert engine.movement()["hit_ratio"] >= 0.5


def test_point_out_of_range_and_engines_of_one_point_are_refused():
    engine = resident()
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
        make_offloaded(StoreReader(SPLIT), options)


@pytest.mark.parametrize("predictor", ["stale_gate", "smoe_partial"])
def test_predictors_read_proxy_gates(predictor):
    with layered(predictor=predictor) as engine:
        np.testing.assert_array_equal(logits(engine), logits(resident()))
        assert engine.movement()["hit_ratio"] > 0
        assert np.nanmax(engine.predictor_run.accuracy.recall_LA) > 0
