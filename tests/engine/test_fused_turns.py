"""A layer's experts in turns: the loop's bits and cache at any number of slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine import fused_turns
from moe_edge.engine.fused_cache import DeviceCache
from moe_edge.engine.fused_turns import PARTS, Turns
from moe_edge.engine.fused_waves import run_through_slots
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_offload, make_offloaded
from moe_edge.engine.slots import RowSlots
from moe_edge.kernels import few, native, prefetch, side_calls
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.record import RecordLayout
from moe_edge.model.router import Routing
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from tests.support.gpu_kernels import interpreted_kernels
from tests.support.layered import StoreReader, forced_logits
from tests.support.running import MODELS, SIZES, alone, row, run, tokens_of
from tests.support.side_streams import beside_resident, watching
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, MOE_ONLY, random_prompts

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)
L, E, K, ROWS, LAYERS = 3, 12, 3, 40, (0, 2)
LAYOUT = RecordLayout.of(MOE_ONLY)
WAVES = ExpertWaves(LAYOUT, E, "blocks")


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """CI also runs these tests where XLA multiplies."""
    monkeypatch.delenv("MOE_EDGE_KERNELS", raising=False)
    yield from watching(prefetch.open_calls)


def fill_early(monkeypatch):
    """As the fastest of links would have it: all is there before START ends."""

    def start(plan_2P, slots_SR, host_ER, others=()):
        record_P, slot_P = plan_2P
        slot_P = jnp.where(record_P < 0, slots_SR.shape[0], slot_P)
        slots_SR = slots_SR.at[slot_P].set(host_ER[record_P], mode="drop")
        return plan_2P, slots_SR, [*others]

    monkeypatch.setattr(prefetch, "start", start)
    monkeypatch.setattr(prefetch, "wait", lambda _, slots, others: (slots, others))


def device_of(policy, layer_S, is_cut=False) -> DeviceCache:
    options = {"profile": np.ones((L, E))} if policy == "static_oracle" else {}
    spec = CacheSpec(L, E, K, layer_S)
    return DeviceCache(spec, get_eviction(policy, **options), LAYERS, is_cut)


def routings(steps):
    """(step, layer, routing): of few experts and of most; padding, a step of it."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        for layer in LAYERS:
            scores_TE = rng.integers(0, 9, (ROWS, E)).astype(np.float32) / 8
            some = rng.permutation(E)[: (E, 5, 9, 3)[step % 4]]
            only_TE = np.where(np.isin(np.arange(E), some), scores_TE, -1)
            ids_TK = np.argsort(-only_TE, axis=1, kind="stable")[:, :K]
            weights_TK = np.take_along_axis(scores_TE, ids_TK, axis=1)
            ids_TK[ROWS - step :] = E
            ids_TK[:] = E if step == 5 else ids_TK
            yield step, layer, Routing(ids_TK.astype(np.int32), weights_TK, scores_TE)


def check_same(device, steps=8):
    """What both ways compute, and what their caches hold after every layer."""
    turns, rng = Turns(device), np.random.default_rng(1)
    hosts_LER = rng.standard_normal((L, E, LAYOUT.size), np.float32)
    hosts = [jnp.asarray(each, jnp.bfloat16) for each in hosts_LER]

    def loop(cache, *given):
        return run_through_slots(device, WAVES, cache, *given)[:2]

    def in_turns(cache, *given):
        return turns.run(WAVES, cache, *given)[:2]

    loop, in_turns = (jax.jit(native.within(each)) for each in (loop, in_turns))
    cache = device.empty(device.new_slots(LAYOUT.size, jnp.bfloat16))
    side_calls.watch(True)
    for step, layer, routing in routings(steps):
        cache = cache._replace(step=jnp.int32(step))
        x_TD = rng.standard_normal((ROWS, LAYOUT.d_model), np.float32)
        given = cache.at(layer), jnp.int32(layer), x_TD, routing, hosts[layer]
        want, want_TD = loop(*given)
        got, got_TD = in_turns(*given)
        np.testing.assert_array_equal(got_TD, want_TD)
        assert step == 5 or np.asarray(got_TD).any()
        for name, array in want.policy.items():
            np.testing.assert_array_equal(got.policy[name], array, err_msg=name)
        np.testing.assert_array_equal(got.slot_N[:-1], want.slot_N[:-1])
        np.testing.assert_array_equal(got.counts_L3, want.counts_L3)
        slot_E = np.asarray(device.slots_of(got, layer))
        held = slot_E >= 0
        place_E = np.asarray(device.place_of(layer, slot_E))[held]
        kept_ER = np.asarray(got.slots_SR)[place_E]
        np.testing.assert_array_equal(kept_ER, np.asarray(hosts[layer])[held])
        cache = cache.after(layer, got)
    noted = side_calls.watch(False)
    copied = sum(int(line.split()[1]) for line in noted if line.startswith("copied"))
    return cache, copied


POOL, SHARES = 14 * (-1,), (*5 * (0,), *7 * (2,))


@pytest.mark.parametrize("link", ["late", "early"])
@pytest.mark.parametrize(
    "policy, layer_S, is_cut",
    [
        ("lru", SHARES, True),
        *slow(("lru", 2 * (-1,), False), ("lru", (0, 0, 2, 2, 2), True)),
        *slow(("lfu", SHARES, False), ("hybrimoe", POOL, False)),
        *slow(("on_demand", SHARES, True), ("successor", 9 * (-1,), False)),
        *slow(("static_oracle", SHARES, True), ("static_prompt", SHARES, False)),
        *slow(("smoe_score", 5 * (-1,), False), ("lru", (*6 * (0,), *E * (2,)), True)),
        *slow(("lru", 24 * (-1,), False), ("lfu", (0, 2, 0, 2, 0, 0, -1, -1), False)),
    ],
)
def test_bits_and_cache_of_the_loop(policy, layer_S, is_cut, link, monkeypatch):
    """Records come at WAIT, as late as they may, or at START, as early."""
    if link == "early":
        fill_early(monkeypatch)
    cache, copied = check_same(device_of(policy, layer_S, is_cut))
    hits, misses, _ = np.asarray(cache.counts_L3).sum(axis=0).tolist()
    never_hits = policy == "on_demand" or len(layer_S) == 2
    assert misses and (hits or never_hits), "both kinds"
    if link == "late":
        assert copied == misses * LAYOUT.num_bytes(jnp.bfloat16)


@pytest.mark.slow
def test_four_parts_of_the_slots(monkeypatch):
    monkeypatch.setattr(fused_turns, "PARTS", 4)
    check_same(device_of("lru", SHARES, is_cut=True))
    fill_early(monkeypatch)
    check_same(device_of("lfu", POOL))


def test_slots_that_are_filled_too_early_are_seen(monkeypatch):
    fill_early(monkeypatch)
    monkeypatch.setattr(fused_turns, "PARTS", 1)
    with pytest.raises(AssertionError):
        check_same(device_of("lru", SHARES, is_cut=True))


def traced(slots: int) -> tuple[Turns, tuple]:
    """Of layers of so many slots, and what `Turns.run` is given of one, as shapes."""
    device = device_of("lru", (*slots * (0,), *slots * (2,)), is_cut=True)
    shape = jax.ShapeDtypeStruct
    cache = jax.eval_shape(
        lambda: device.empty(device.new_slots(LAYOUT.size, jnp.bfloat16)).at(0)
    )
    ids, weights = (shape((ROWS, K), each) for each in (jnp.int32, jnp.float32))
    routing = Routing(ids, weights, shape((ROWS, E), jnp.float32))
    host_ER = shape((E, LAYOUT.size), jnp.bfloat16)
    x_TD = shape((ROWS, LAYOUT.d_model), jnp.float32)
    return Turns(device), (cache, shape((), jnp.int32), x_TD, routing, host_ER)


@pytest.mark.parametrize("slots", [1, 2, 5, 6, 11, 12])
def test_how_many_turns_there_are_is_known_from_shapes(slots, monkeypatch):
    # Products may be loops: XLA's are.
    monkeypatch.setattr(ExpertWaves, "run", lambda self, total, *given: total)
    turns, given = traced(slots)
    run = native.within(lambda *given: turns.run(WAVES, *given))
    text = str(jax.make_jaxpr(run)(*given))
    for name in ("start", "wait"):
        starts = text.count(f"target_name=moe_edge_prefetch_{name}")
        assert starts == PARTS * -(-E // slots)
    assert "while" not in text and "cond[" not in text


@pytest.mark.parametrize("slots, suit", [(3, False), (4, True)])
def test_more_waves_than_compile_soon_are_the_loops(slots, suit, monkeypatch):
    monkeypatch.setattr(fused_turns, "MOST_WAVES", 3)
    turns, (cache, _, _, routing, _) = traced(slots)
    assert turns.suits(WAVES, cache, routing.ids_TK) == suit
    assert turns.is_somewhere == suit and (turns.remarks() == []) == suit
    of_pairs = ExpertWaves(LAYOUT, E, "pairs")
    assert not turns.suits(of_pairs, cache, routing.ids_TK)


def test_layers_of_few_slots_alone_are_the_loops(monkeypatch):
    monkeypatch.setattr(fused_turns, "MOST_WAVES", 2)
    turns = Turns(device_of("lru", SHARES, is_cut=True))
    (remark,) = turns.remarks()
    assert "in 1 of 2 layers" in remark and turns.is_somewhere
    turns = Turns(device_of("lru", SHARES))  # one program for both
    (remark,) = turns.remarks()
    assert "in 2 of 2 layers" in remark and not turns.is_somewhere


def test_a_prompt_of_too_many_waves_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(fused_turns, "MOST_WAVES", 1)
    given = MOE_ONLY, np.float32, (30, 9)
    engine, noted = check_engine(*given, turns=False, slot_plan="equal")
    (remark,) = engine.remarks()
    assert "in 2 of 2 layers with experts" in remark
    assert "has 6 slots for 12 experts, and it would take 12" in remark
    assert not [line for line in noted if line.startswith("copied")]


def options_of(**options):
    given = {"mode": "fused", "device_memory": "50%", "overlap_in_fused": True}
    return OffloadOptions(**given | options)


def check_engine(config, dtype, lengths, turns=True, **options):
    """Bits of the resident engine; what the shim has copied is what is counted."""
    reader, steps = StoreReader(config, dtype=dtype), 2
    given = reader, lengths, options_of(**options), steps
    want, got, engine, noted = beside_resident(*given)
    np.testing.assert_array_equal(got, want)
    assert engine.report()["overlap"] == turns and engine.lossless
    return engine, noted


def test_prompts_have_the_bits_of_the_resident_engine():
    engine, noted = check_engine(MOE_ONLY, np.float32, (30, 9), slot_plan="one_pool")
    copied = sum(int(line.split()[1]) for line in noted if line.startswith("copied"))
    record_bytes = RecordLayout.of(MOE_ONLY).num_bytes(np.float32)
    assert not engine.remarks()
    lookups_L2 = engine.expert_state().lookups[False]  # steps go by the loop
    assert copied == lookups_L2[:, 1].sum() * record_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype, options",
    [
        ("gqa", BF16, {"device_memory": "17%", "slot_plan": "equal"}),
        ("gqa", BF16, {"device_memory": "100%", "slot_plan": "equal"}),
        ("gpt_oss", np.float32, {"eviction": "hybrimoe"}),
        ("q4_0", np.float32, {}),
        ("mla", BF16, {"assist": "two_pointer", "assist_in_fused": True}),
        ("states", BF16, {"route": "topk"}),
    ],
)
def test_bits(name, dtype, options):
    check_engine(ALL[name], dtype, (40, 3, 33), **options)


@pytest.mark.slow
@pytest.mark.parametrize("zero_copy, form", [(False, "1"), (True, "1"), (True, "cuda")])
def test_bits_of_the_kernels_of_a_gpu(zero_copy, form):
    options = {"slot_plan": "equal", "zero_copy": zero_copy}
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, form)
        patch.setattr(few, "MISS_PROGRAMS", 3)
        check_engine(MOE_ONLY, BF16, (30, 9), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "gpt_oss"])
def test_rows_that_join_get_the_tokens_that_each_gets_alone(name):
    """In chunks of prompts of two rows, with steps of others between them."""
    rows = [row(i, length, 6) for i, length in enumerate((45, 12, 33))]
    arrivals = [*zip((0, 1, 2), rows, strict=True)]
    reader = StoreReader(MODELS[name])
    with make_offloaded(reader, options_of(device_memory="25%")) as engine:
        side_calls.watch(True)
        found = tokens_of(run(RowSlots(engine, **SIZES), arrivals))
        noted = side_calls.watch(False)
    assert any(line.startswith("copied") for line in noted)
    assert found == {each.id: alone(name, each) for each in rows}


@pytest.mark.slow
def test_steps_of_many_rows_fetch_ahead_behind_prompts_in_turns():
    """Those steps are the loop's: unrolled in all layers they would compile long."""
    config, prompts = ALL["gqa"], random_prompts(ALL["gqa"], 18 * (5,))
    found = []
    for overlap in (True, False):
        options = {"predictor": "stale_gate", "prefetch_in_fused": True}
        options |= {"slot_plan": "equal", "overlap_in_fused": overlap}
        reader = StoreReader(config, dtype=BF16)
        with make_offloaded(reader, options_of(**options)) as engine:
            logits = forced_logits(engine, prompts, 4)
            found.append((logits, *engine.counts(), engine.moved()))
            assert engine.moved().prefetch_bytes > 0
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"mode": "layered"}, "overlap_in_fused is True and the mode layered"),
        ({"eviction": "moe_infinity"}, "moe_infinity has a gave_up of its own"),
    ],
)
def test_what_does_not_go_together_is_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        options_of(**change)


def test_mode_auto_that_is_layered_is_refused():
    with pytest.raises(ConfigError, match="overlap_in_fused is True and mode auto is"):
        check_offload(StoreReader(MOE_ONLY), options_of(mode="auto"))
