"""Experts that are computed while they arrive: bits, tables and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine import fused_zero_copy
from moe_edge.engine.fused_cache import DeviceCache
from moe_edge.engine.fused_zero_copy import ZeroCopy
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_offload, make_offloaded
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.engine.resident import ResidentEngine
from moe_edge.kernels import eights, few, few_cuda, native, side_calls
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.model.router import Routing
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.route.base import gate_scores
from tests.support.gpu_kernels import as_on_a_gpu, interpreted_kernels
from tests.support.layered import BLOCKS, CAPACITY, StoreReader, forced_logits
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, random_prompts, random_weights

pytestmark = pytest.mark.usefixtures("few_optimisations")
STEPS = 6


@pytest.fixture(autouse=True)
def kernels_are_possible(monkeypatch):
    """CI also runs these tests where XLA's form is asked for."""
    monkeypatch.delenv("MOE_EDGE_KERNELS", raising=False)


def options_of(slots, **options):
    mode = {"mode": "fused", "zero_copy": True, "slot_plan": "one_pool"}
    return OffloadOptions(device_memory=f"{100 * slots / BLOCKS}%", **mode | options)


def check_bits(name, dtype, lengths, slots, form="1"):
    """Logits of the resident engine by the same kernel, and what the loop moves."""
    prompts = random_prompts(ALL[name], lengths)
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, form)
        patch.setattr(few, "MISS_PROGRAMS", 3)
        resident = ResidentEngine(random_weights(ALL[name], dtype=dtype))
        want = forced_logits(resident, prompts, STEPS)
        moved = []
        for zero_copy in (True, False):
            given = options_of(slots, zero_copy=zero_copy)
            with make_offloaded(StoreReader(ALL[name], dtype=dtype), given) as engine:
                got = forced_logits(engine, prompts, STEPS)
                assert engine.report()["zero_copy"] == zero_copy
                moved.append((engine.counts(), engine.moved()))
            np.testing.assert_array_equal(got, want)
    for one, other in zip(*moved, strict=True):
        np.testing.assert_array_equal(one, other)
    return moved[0][0]


def test_a_layer_computes_its_experts_and_keeps_them():
    config, rng, rows = ALL["gqa"], np.random.default_rng(0), 2
    layout, moe, slots = RecordLayout.of(config), config.moe, 7
    spec = CacheSpec(3, 12, 3, slots * (-1,))
    device = DeviceCache(spec, get_eviction("lru"), (1, 2))
    host_ER = rng.standard_normal((12, layout.size), np.float32)
    host_ER = jnp.asarray(host_ER, jnp.bfloat16)
    cache = device.empty(jnp.zeros((slots, layout.size), jnp.bfloat16))
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, "1")
        patch.setattr(few, "MISS_PROGRAMS", 3)
        zero_copy = ZeroCopy(device, config)
        run = jax.jit(zero_copy.run, static_argnums=1)
        resident = jax.jit(
            native.within(
                lambda *given: run_experts(*given, host_ER, layout, method="pairs")
            )
        )
        for step in range(12):
            scores_TE = rng.random((rows, moe.num_experts), np.float32)
            ids_TK = np.argsort(-scores_TE, axis=1)[:, : moe.top_k].astype(np.int32)
            ids_TK[-1, 2:] = 12 if step == 3 else ids_TK[-1, 2:]
            x_TD = rng.standard_normal((rows, config.d_model), np.float32)
            weights_TK = np.take_along_axis(scores_TE, ids_TK % 12, axis=1)
            cache = cache._replace(step=jnp.int32(step))
            routing = Routing(ids_TK, weights_TK, scores_TE)
            cache, y_TD, _ = run(cache, 1 + step % 2, x_TD, routing, host_ER)
            want_TD = resident(x_TD, ids_TK, weights_TK)
            np.testing.assert_allclose(y_TD, want_TD, rtol=1e-5, atol=1e-5)
            key_S = np.asarray(cache.policy["key_S"])
            held = key_S >= 0
            values = layout.num_values
            kept_SR = np.asarray(cache.slots_SR)[held, :values]
            want_SR = np.asarray(host_ER)[key_S[held] % 12, :values]
            np.testing.assert_array_equal(kept_SR, want_SR)
    counts_L3 = np.asarray(cache.counts_L3)
    assert (counts_L3[1:] >= [1, 12, 12]).all(), "hits, misses, evictions"


@pytest.mark.slow
def test_one_row_has_the_bits_of_the_resident_engine():
    counts = check_bits("gqa", BF16, (9,), 8)
    assert (counts.misses_L[1:] > STEPS).all() and (counts.evictions_L[1:] > 4).all()


@pytest.mark.slow
def test_biases():
    check_bits("gpt_oss", np.float32, (9,), 8)


@pytest.mark.slow
def test_quantised_records_stand_in_slots_as_they_came(monkeypatch):
    monkeypatch.setenv(eights.VARIABLE, "1")
    counts = check_bits("q8_0", np.float32, (9,), 8)
    assert (counts.evictions_L[1:] > 4).all()


@pytest.mark.slow
@pytest.mark.parametrize("rows, slots", [(2, 7), (8, 14)])
def test_rows_that_share_absent_experts(rows, slots):
    # Eight rows choose 24 of 12 experts, which one layer's look-up drives out again.
    counts = check_bits("gqa", BF16, rows * (9,), slots)
    assert (counts.evictions_L[1:] > STEPS).all()


def decoded(engine, prompts, after_prefill=None, on_routing=None):
    """Logits `[STEPS, B, V]` of given tokens."""
    session = engine.new_session(len(prompts), CAPACITY)
    engine.prefill(session, prompts)
    if after_prefill is not None:
        after_prefill()
    active_B, out = jax.device_put(np.ones(len(prompts), bool)), []
    for tokens_B in np.array(random_prompts(engine.config, STEPS * (len(prompts),))):
        tokens_B = jax.device_put(tokens_B.astype(np.int32))
        out.append(engine.decode(session, tokens_B, active_B, on_routing))
    return np.stack(jax.device_get(out))


needs_host_kernels = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)


@needs_host_kernels
@pytest.mark.parametrize(
    "name, dtype, rows, slots",
    [
        ("gqa", BF16, 1, 8),
        *slow(("gqa", BF16, 8, 14), ("gpt_oss", np.float32, 2, 7)),
    ],
)
def test_by_our_own_cuda(name, dtype, rows, slots, monkeypatch):
    monkeypatch.setattr(few, "_product", None)  # the Triton form
    counts = check_bits(name, dtype, rows * (9,), slots, "cuda")
    assert (counts.evictions_L[1:] > 4).all()


@needs_host_kernels
def test_a_miss_loads_its_weights_from_the_host_once():
    """Of two rows, by our own CUDA, whose shim counts what the host's memory gives."""
    config, before = ALL["gqa"], []
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, "cuda")
        few_cuda.open_calls()
        with make_offloaded(StoreReader(config, dtype=BF16), options_of(7)) as engine:

            def after_prefill():  # whose misses come by the loop
                before.append(engine.counts().misses_L.sum())
                side_calls.watch(True)

            decoded(engine, random_prompts(config, 2 * (9,)), after_prefill)
            noted = side_calls.watch(False)
            misses = engine.counts().misses_L.sum() - before[0]
    loaded = [int(line.split()[1]) for line in noted if line.startswith("loaded")]
    record = RecordLayout.of(config).num_values * np.dtype(BF16).itemsize
    assert misses > STEPS and sum(loaded) == misses * record


@pytest.mark.slow
def test_waves_of_rows_where_slots_are_few():
    config, seen = ALL["gqa"], []
    prompts, rows = random_prompts(config, 5 * (9,)), 2
    given = options_of(14, slot_plan="equal")  # seven a layer: two rows a wave
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, "1")
        patch.setattr(few, "MISS_PROGRAMS", 3)
        want = decoded(ResidentEngine(random_weights(config, dtype=BF16)), prompts)
        with make_offloaded(StoreReader(config, dtype=BF16), given) as engine:
            note = lambda *choice: seen.append(choice)  # noqa: E731
            got, counts = decoded(engine, prompts, engine.clear, note), engine.counts()
    np.testing.assert_array_equal(got, want)

    # The same on the host: a hit is an expert that no wave of its layer fetched.
    cache = SlotCache(CacheSpec(3, 12, 3, 7 * (1,) + 7 * (2,)), get_eviction("lru"))
    counted_L2 = np.zeros((3, 2), int)
    for place, (layer, routing) in enumerate(seen):
        ids_TK, fetched = np.asarray(routing.ids_TK), []
        scores_TE = np.asarray(gate_scores(routing.scores_TE, config.moe))
        for first in range(0, len(ids_TK), rows):
            wave = (each[first : first + rows] for each in (ids_TK, scores_TE))
            for expert in cache.look_up(layer, *wave, 1 + place // 2).misses:
                cache.admit(layer, expert)
                fetched.append(expert)
        hits = set(ids_TK.reshape(-1).tolist()) - set(fetched)
        counted_L2[layer] += len(hits), len(fetched)
    np.testing.assert_array_equal(counts.hits_L, counted_L2[:, 0])
    np.testing.assert_array_equal(counts.misses_L, counted_L2[:, 1])
    assert (counts.evictions_L[1:] > STEPS).all() and (counts.hits_L[1:] > 0).all()


def test_mode_layered_is_refused():
    with pytest.raises(ConfigError, match="zero_copy is True and the mode layered"):
        OffloadOptions(mode="layered", zero_copy=True)


def test_mode_auto_that_is_layered_is_refused():
    options = options_of(8, mode="auto", predictor="previous")
    with as_on_a_gpu(), pytest.raises(ConfigError, match="mode auto is layered here"):
        check_offload(StoreReader(ALL["gqa"]), options)


def test_cpu_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="here is cpu"):
        check_offload(StoreReader(ALL["gqa"]), options_of(8))
    monkeypatch.setenv("MOE_EDGE_KERNELS", "xla")
    with as_on_a_gpu(), pytest.raises(ConfigError, match="MOE_EDGE_KERNELS says xla"):
        check_offload(StoreReader(ALL["gqa"]), options_of(8))


def test_rounded_few_rows_are_refused(monkeypatch):
    monkeypatch.setenv(few.VARIABLE, "0")
    with as_on_a_gpu(), pytest.raises(ConfigError, match="MOE_EDGE_FEW_ROWS is 0"):
        check_offload(StoreReader(ALL["gqa"]), options_of(8))


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            {"expert_dim": 32, "expert_kind": "q8_0"},
            "are q8_0; .* with MOE_EDGE",
        ),
        ({"activation": "gelu"}, "the experts' activation gelu"),
    ],
)
def test_experts_that_the_kernel_lacks_are_refused(change, reason):
    moe = dataclasses.replace(ALL["gqa"].moe, **change)
    config = dataclasses.replace(ALL["gqa"], d_model=64, moe=moe)
    with pytest.raises(ConfigError, match=reason):
        refuse(Asked.of(OffloadOptions(zero_copy=True), model=config))


def test_our_own_cuda_has_exact_gelu(monkeypatch):
    monkeypatch.setenv(few.VARIABLE, "cuda")
    moe = dataclasses.replace(ALL["gqa"].moe, activation="gelu")
    config = dataclasses.replace(ALL["gqa"], moe=moe)
    refuse(Asked.of(OffloadOptions(zero_copy=True), model=config))


@pytest.mark.parametrize(
    "policy, slots, reason",
    [
        ("moe_infinity", 9, "policy moe_infinity has a gave_up of its own"),
        ("lru", 2, "a token chooses 3 experts and a layer has 2 slots"),
        ("lru", 3, None),
    ],
)
def test_what_runs_by_the_loop_says_why(policy, slots, reason):
    spec = CacheSpec(3, 12, 3, (-1,) * slots)
    device = DeviceCache(spec, get_eviction(policy), (1, 2))
    with as_on_a_gpu():
        zero_copy = ZeroCopy(device, ALL["gqa"])
    ids_TK = np.zeros((1, 3), np.int32)
    if reason is None:
        assert zero_copy.hindrance is None and zero_copy.suits(1, ids_TK)
        assert zero_copy.suits(1, np.zeros((16, 3), np.int32)), "in waves"
        assert not zero_copy.suits(1, np.zeros((17, 3), np.int32))
        assert not zero_copy.suits(jnp.int32(1), ids_TK), "prefill"
    else:
        assert reason in zero_copy.hindrance and not zero_copy.suits(1, ids_TK)


@pytest.mark.slow
def test_policy_that_chooses_one_by_one_runs_by_the_loop():
    prompts = random_prompts(ALL["gqa"], (9,))
    with interpreted_kernels(None) as patch:
        patch.setattr(fused_zero_copy, "look_up", None)
        options = options_of(8, eviction="moe_infinity")
        with make_offloaded(StoreReader(ALL["gqa"], dtype=BF16), options) as engine:
            (remark,) = engine.remarks()
            assert remark.startswith("zero_copy is off, experts are fetched by a loop")
            assert engine.report()["zero_copy"] is False
            forced_logits(engine, prompts, 1)
