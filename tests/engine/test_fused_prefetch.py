"""Mode fused that fetches ahead: bits, what moves when, tables and refusals."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.fused import FusedEngine
from moe_edge.engine.fused_cache import DeviceCache
from moe_edge.engine.fused_lookup import look_ahead, look_up
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_offload, make_offloaded
from moe_edge.kernels import few, lookup, native
from moe_edge.model.record import RecordLayout
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.evict_lru import Lru
from tests.support.gpu_kernels import interpreted_kernels
from tests.support.layered import StoreReader
from tests.support.side_streams import beside_resident
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, random_prompts

STEPS = 6
E, L, LAYER = 12, 3, 2
needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)


@pytest.fixture(autouse=True)
def kernels_are_possible(monkeypatch):
    """CI also runs these tests where XLA multiplies."""
    monkeypatch.delenv("MOE_EDGE_KERNELS", raising=False)


def options_of(**options):
    given = {"mode": "fused", "slot_plan": "equal", "device_memory": "60%"}
    given |= {"predictor": "stale_gate", "prefetch_in_fused": True}
    return OffloadOptions(**given | options)


def model_of(name, layers=3):
    """All of its layers have experts."""
    attention = ALL[name].attention
    if attention.windows:
        windows = (None, 9, None, 9)[:layers]
        attention = dataclasses.replace(attention, windows=windows)
    changed = {"attention": attention, "dense_layers": ()}
    return dataclasses.replace(ALL[name], num_layers=layers, **changed)


def check_bits(config, dtype, lengths, **options):
    """Logits of the resident engine; what was asked for and what came agree.

    Returns:
      the engine, and what its streams were given.
    """
    reader = StoreReader(config, dtype=dtype)
    given = reader, lengths, options_of(**options), STEPS
    want, got, engine, noted = beside_resident(*given)
    if engine.lossless:
        np.testing.assert_array_equal(got, want)
    copied = sum(int(line.split()[1]) for line in noted if line.startswith("copied"))
    moved = engine.moved()
    assert copied == moved.prefetch_bytes > 0
    assert 0 <= moved.wasted_bytes < moved.prefetch_bytes, "one was of use"
    misses = engine.counts().misses_L.sum()
    assert moved.demand_bytes == misses * RecordLayout.of(config).num_bytes(
        reader.dtype
    )
    return engine, noted


@needs_kernels
def test_a_step_has_the_bits_of_the_resident_engine():
    engine, noted = check_bits(model_of("gqa"), np.float32, (9,))
    begin = ["compute records", "prefetch waits", "prefetch launches"]
    begin += ["prefetch records", "compute waits"]
    seen = [line for line in noted if not line.startswith("copied")]
    assert seen == STEPS * 2 * begin, "one layer's after the other, each waited for"
    report = engine.report()
    assert report["prefetch"] == "stale_gate" and report["lossless"]
    engine.reset_records()
    assert engine.moved().prefetch_bytes == engine.moved().wasted_bytes == 0
    engine.recover()
    assert engine.moved().prefetch_bytes == 0, "not less than nothing"


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    "name, dtype, lengths, options",
    [
        ("gqa", BF16, (20, 3, 33), {}),
        ("gqa", np.float32, (9,), {"eviction": "lfu", "prefetch_limit": 1}),
        ("gqa", np.float32, (9,), {"slot_plan": "planned", "device_memory": "55%"}),
        ("gpt_oss", np.float32, (9,), {"eviction": "hybrimoe"}),
        ("q4_0", np.float32, (9, 4), {}),
        ("mla", BF16, (9,), {"predictor": "n_layer_gate"}),
        # Fewer slots than a token's experts: waves.
        ("gqa", np.float32, (9,), {"device_memory": "17%"}),
    ],
)
def test_bits(name, dtype, lengths, options):
    if options.get("slot_plan") == "planned":
        options |= {"slot_plan_options": {"slots": [8, 5, 6]}}
    check_bits(model_of(name), dtype, lengths, **options)


@pytest.mark.slow
@needs_kernels
def test_a_lossy_route_sees_what_has_come():
    options = {"route": "substitute", "route_options": {"a": 0.5}}
    engine, _ = check_bits(model_of("gqa"), np.float32, (9,), **options)
    assert not engine.lossless and engine.moved().substituted > 0


@pytest.mark.slow
@needs_kernels
def test_groups_of_layers_fetch_within_each(monkeypatch):
    """Two programs of two layers: one prefetch each a step, and the same bits."""
    monkeypatch.setitem(FusedEngine.__init__.__kwdefaults__, "layers_per_program", 2)
    _, noted = check_bits(model_of("gqa", 4), np.float32, (9,))
    assert noted.count("prefetch launches") == 2 * STEPS


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    "lengths, form", [((9,), "1"), ((9, 4, 7), "1"), ((9, 4, 7), "cuda")]
)
def test_bits_where_nothing_is_copied_before_it_is_computed(lengths, form):
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, form)
        patch.setattr(few, "MISS_PROGRAMS", 3)
        given = {"zero_copy": True, "device_memory": "75%"}
        engine, _ = check_bits(model_of("gqa"), BF16, lengths, **given)
        assert engine.report()["zero_copy"] and engine.counts().evictions_L.any()


@needs_kernels
def test_slots_stay_where_they_are():
    config = model_of("gqa")
    with make_offloaded(StoreReader(config), options_of()) as engine:
        session = engine.new_session(1, 64)
        engine.prefill(session, random_prompts(config, (9,)))
        token_B, active_B = engine.put((np.ones(1, np.int32), np.ones(1, bool)))

        def step():
            engine.decode(session, token_B, active_B)
            slots = engine._state.slots_SR
            return [each.unsafe_buffer_pointer() for each in slots]

        step()
        assert step() == step()
        engine.clear()
        assert not engine.expert_state().resident_LE.any()
        assert engine.device_bytes() > sum(x.nbytes for x in engine._state.slots_SR)


def some_cache(policy, rng):
    """A cache in the middle of a run; two slots of the last layer are empty."""
    layer_S = (0, 0, 1, 1, 1, *8 * (2,))
    spec = CacheSpec(L, E, 3, layer_S)
    device = DeviceCache(spec, get_eviction(policy), (0, 1, 2), is_cut=True)
    cache = device.empty(device.new_slots(4, jnp.float32))
    held = rng.permutation(E)[:6].astype(np.int32)
    key_S = np.full(13, -1, np.int32)
    key_S[5:11] = LAYER * E + held
    slot_N = np.full(L * E + 1, -1, np.int32)
    slot_N[key_S[5:11]] = np.arange(5, 11)
    last_B = rng.permutation(L * E + 1).astype(np.int32)
    state = cache.policy | {"key_S": jnp.array(key_S), "last_B": jnp.array(last_B)}
    state |= {"clock": jnp.int32(1)}  # of a look-up long ago
    for name in device.policy.per_block:
        like = state[name]
        state[name] = jnp.asarray(rng.integers(0, 4, like.shape), like.dtype)
    changed = {"slot_N": jnp.array(slot_N), "step": jnp.int32(7)}
    return device, cache._replace(policy=state, **changed), held


def ahead_of(device, layer, ids_M, limit=8) -> lookup.Ahead:
    return lookup.Ahead(layer, device.first_of(layer), ids_M, limit)


def looked_ahead(device, cache, ids_M, layer=LAYER):
    """The cache and a plan of what a layer is expected to choose."""

    def run(cache, layer, ids_M):
        return look_ahead(device, cache, ahead_of(device, layer, ids_M))

    return jax.jit(run)(cache, layer, jnp.asarray(ids_M, jnp.int32))


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_who_is_expected_gets_the_slots_of_who_is_not(policy):
    rng = np.random.default_rng(0)
    device, cache, held = some_cache(policy, rng)
    absent = np.setdiff1d(np.arange(E), held)
    ids_M = np.array([held[2], absent[3], E, absent[0], absent[5]], np.int32)
    by_xla, plan_2M = looked_ahead(device, cache, ids_M)
    with interpreted_kernels(None):
        by_kernel, (host_M, slot_M) = looked_ahead(device, cache, ids_M)
    assert plan_2M[0].tolist() == [-1, absent[3], -1, absent[0], absent[5]]
    # The host's order, over the slots that hold nobody who is expected.
    state = jax.tree.map(np.asarray, cache.policy)
    order = [s - 5 for s in device.policy.order(state) if s >= 5]
    order = [s for s in order if s != np.flatnonzero(held == held[2])[0]]
    order = [6, 7] + [s for s in order if s < 6]  # the empty ones first
    assert plan_2M[1, [1, 3, 4]].tolist() == order[:3]
    comes = np.asarray(host_M) >= 0
    assert host_M[comes].tolist() == [absent[3], absent[0], absent[5]]
    assert slot_M[comes].tolist() == order[:3]
    check_same(by_kernel, by_xla)
    # No use: nobody is refreshed, who enters has the time just after the look-up.
    last_B, before_B = by_xla.policy["last_B"], cache.policy["last_B"]
    new_B = LAYER * E + absent[[3, 0, 5]]
    assert (last_B[new_B] == 2 * (7 * L + LAYER - 1) + 1).all()
    others_B = np.setdiff1d(np.arange(L * E), new_B)
    np.testing.assert_array_equal(last_B[others_B], before_B[others_B])
    assert by_xla.counts_L3.tolist() == [[0] * 3, [0] * 3, [0, 0, 1]]
    assert by_xla.ahead_2.tolist() == [3, 0]


def check_same(got, want):
    """Two caches, but for the spare slot."""
    np.testing.assert_array_equal(got.slot_N[:-1], want.slot_N[:-1])
    for name, array in got.policy.items():
        np.testing.assert_array_equal(array, want.policy[name], err_msg=name)
    for name in ("counts_L3", "ahead_2"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_what_came_ahead_is_unused_until_its_layer_chooses_it():
    device, cache, held = some_cache("lru", np.random.default_rng(1))
    absent = np.setdiff1d(np.arange(E), held)
    last_B = 2 * (cache.policy["last_B"] // 2)
    cache = cache._replace(policy=cache.policy | {"last_B": last_B})
    cache, _ = looked_ahead(device, cache, absent[:2])
    unused_LE = np.asarray(device.unused_LE(cache))
    assert np.argwhere(unused_LE).tolist() == [[LAYER, e] for e in absent[:2]]
    ids_TK = np.array([[absent[0], held[0], absent[3]]], np.int32)
    given = ids_TK, jnp.zeros((1, E)), jnp.zeros((E, 4))
    acquire = jax.jit(lambda *given: device.acquire(*given)[0], static_argnums=1)
    cache = acquire(cache.at(LAYER), LAYER, *given)
    unused_LE = np.asarray(device.unused_LE(cache))
    assert np.argwhere(unused_LE).tolist() == [[LAYER, absent[1]]]
    assert cache.ahead_2.tolist() == [2, 1]


def turns(tokens, steps, seed):
    """(step, layer, what it chooses, scores, what the next one is expected to)."""
    rng = np.random.default_rng(seed)
    for step, layer in itertools.product(range(steps), range(L - 1)):
        scores_TE = rng.integers(0, 5, (tokens, E)).astype(np.float32) / 8
        ids_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :3].astype(np.int32)
        ids_TK[-1, 3 - step % 3 :] = E
        ids_M = rng.permutation(E)[: rng.integers(1, 4)]
        ids_M = np.append(ids_M, np.full(4 - len(ids_M), E)).astype(np.int32)
        yield step, layer, ids_TK, scores_TE, rng.permutation(ids_M)


@pytest.mark.parametrize(
    "policy, tokens",
    [
        ("lru", 1),
        *slow(("lru", 2), ("lfu", 1), ("hybrimoe", 2), ("on_demand", 1)),
        *slow(("successor", 2)),
    ],
)
def test_both_plans_in_one_launch_are_those_of_two(policy, tokens):
    """Of each layer and its next one: the same plans, rows, tables and counters."""
    layer_S = (*7 * (0,), *8 * (1,), *9 * (2,))
    device = DeviceCache(
        CacheSpec(L, E, 3, layer_S), get_eviction(policy), (0, 1, 2), is_cut=True
    )

    def run(cache, ids_TK, scores_TE, ids_M, layer, launches):
        given = device, cache, layer, ids_TK, scores_TE, None
        ahead, last = ahead_of(device, layer + 1, ids_M, limit=2), layer + 1 == L - 1
        if launches == 1:
            cache, rows, plan_2M = look_up(*given, ahead)
        else:
            cache, rows, _ = look_up(*given)
            cache, plan_2M = look_ahead(device, cache, ahead)
        if last:  # it uses what came for it
            given = device, cache, layer + 1, ids_TK, scores_TE
            cache, after, _ = look_up(*given)
            return cache, rows, plan_2M, after
        return cache, rows, plan_2M, None

    with interpreted_kernels(None):
        step_of = jax.jit(run, static_argnums=(4, 5))
        cache = device.empty(device.new_slots(4, jnp.float32))
        for step, layer, *given in turns(tokens, 12, 0):
            cache = cache._replace(step=jnp.int32(step))
            one, *found = step_of(cache, *given, layer, 1)
            two, *wanted = step_of(cache, *given, layer, 2)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
            check_same(one, two)
            cache = one
        for launches in (1, 2):
            text = str(
                jax.make_jaxpr(run, static_argnums=(4, 5))(cache, *given, 0, launches)
            )
            assert text.count("name=moe_edge_look_up") == launches
    fetched, used = cache.ahead_2.tolist()
    assert fetched > used > 0 and cache.counts_L3[1:, 2].any()


class WorthNow(Lru):
    """What a slot is worth is no matter of its block alone."""

    name = "worth_now"

    def value(self, state):
        key_S = state["key_S"].astype(jnp.float32)
        return key_S - jnp.max(key_S)


def test_a_policy_whose_worth_is_its_own_is_asked_before_each_plan():
    _, cache, held = some_cache("lru", np.random.default_rng(3))
    spec = CacheSpec(L, E, 3, (0, 0, 1, 1, 1, *8 * (2,)))
    device = DeviceCache(spec, WorthNow(), (0, 1, 2), is_cut=True)
    ids_TK = jnp.array([[2, 4, 7]], jnp.int32)
    absent = jnp.asarray(np.setdiff1d(np.arange(E), held)[:2], jnp.int32)
    with interpreted_kernels(None):

        def run(cache):
            given = device, cache, 1, ids_TK, jnp.zeros((1, E)), None
            return look_up(*given, ahead_of(device, 2, absent))

        assert str(jax.make_jaxpr(run)(cache)).count("name=moe_edge_look_up") == 2


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"mode": "layered"}, "the mode layered"),
        ({"predictor": "none"}, "the predictor none; use predictor stale_gate"),
        ({"predictor": "previous"}, "the predictor previous; use predictor"),
        ({"predictor": "n_layer_gate", "horizon": 2}, "horizon is 2; use horizon 1"),
        ({"eviction": "moe_infinity"}, "moe_infinity has a gave_up of its own"),
        ({"slot_plan": "one_pool"}, "the slot plan one_pool; use slot_plan equal"),
        ({"prefetch_in_fused": False}, "mode fused has no predictor; use mode layered"),
    ],
)
def test_what_does_not_go_together_is_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        options_of(**change)


def test_mode_auto_that_is_layered_is_refused():
    reader = StoreReader(model_of("gqa"))
    with pytest.raises(ConfigError, match="mode auto is layered here"):
        check_offload(reader, options_of(mode="auto"))
    assert options_of(mode="auto").choose_mode("gpu") == "fused"


@needs_kernels
def test_a_plan_that_becomes_one_pool_is_refused():
    options = options_of(slot_plan="auto", device_memory="12%")
    with pytest.raises(ConfigError, match="layers share 4 slots; set slot_plan"):
        make_offloaded(StoreReader(model_of("gqa")), options)
