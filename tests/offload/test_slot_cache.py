import gzip

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import EVICTIONS, CacheSpec, get_eviction
from moe_edge.offload.evict_belady import future_uses
from moe_edge.offload.slot_cache import SlotCache
from tests.support.evictions import eviction_of
from tests.support.slow_cases import slow_but
from tests.support.traces import ROUTING as TRACES

# Decode hit ratios of ../shared/interfaces.md at 13, 32 and 64 slots a layer.
PUBLISHED = {
    ("qwen3_30b_a3b", "lru"): (0.546, 0.817, 0.958),
    ("qwen3_30b_a3b", "lfu"): (0.580, 0.821, 0.958),
    ("qwen3_30b_a3b", "belady"): (0.698, 0.912, 0.969),
    ("gemma4_26b_a4b", "lru"): (0.545, 0.795, 0.951),
    ("gemma4_26b_a4b", "lfu"): (0.590, 0.815, 0.952),
    ("gemma4_26b_a4b", "belady"): (0.696, 0.900, 0.963),
}


def ids_of(*experts):
    return np.array([experts], np.int32)


def step_through(cache, lookups):
    """Hits of each lookup (step, layer, ids); every miss is admitted."""
    hits = []
    for step, layer, ids_K in lookups:
        found = cache.look_up(layer, ids_K.reshape(1, -1), None, step)
        for expert in found.misses:
            cache.admit(layer, expert)
        hits.append(found.hits)
    return hits


def read_trace(name):
    """Lookups of a trace in running order, and the first decode step."""
    with gzip.open(TRACES / f"trace_{name}.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", skiprows=1, usecols=range(1, 6))
    phase, step, layer, rank, expert = table.astype(np.int64).T
    first_decode = int(step[phase == 0].max()) + 1
    step = np.where(phase == 1, step - step[phase == 1].min() + first_decode, step)
    order = np.lexsort((rank, layer, step))
    k = int(rank.max()) + 1
    ids_NK = expert[order].reshape(-1, k).astype(np.int32)
    return step[order][::k], layer[order][::k], ids_NK, first_decode


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no trace folder {TRACES}")
@pytest.mark.parametrize(
    "name, policy", slow_but([("qwen3_30b_a3b", "lru")], sorted(PUBLISHED))
)
def test_hit_ratios_on_public_traces_golden(name, policy):
    steps, layers, ids_NK, first_decode = read_trace(name)
    L, E, K = int(layers.max()) + 1, 128, ids_NK.shape[1]
    options = {}
    if policy == "belady":
        uses = np.repeat(steps, K), np.repeat(layers, K), ids_NK.reshape(-1)
        options["future"] = future_uses(*uses, L, E)
    for slots, published in zip((13, 32, 64), PUBLISHED[name, policy], strict=True):
        spec = CacheSpec(L, E, K, tuple(np.repeat(np.arange(L), slots).tolist()))
        cache = SlotCache(spec, get_eviction(policy, **options))
        lookups = zip(steps.tolist(), layers.tolist(), ids_NK, strict=True)
        hits = step_through(cache, lookups)
        decode = [len(h) for h, s in zip(hits, steps, strict=True) if s >= first_decode]
        assert np.mean(decode) / K == pytest.approx(published, abs=0.005)


def test_lru_hand_computed():
    """Three slots. Step 2: 0 (a hit of step 1) is older than 2 (entered after it)."""
    cache = SlotCache(CacheSpec(1, 6, 2, (0,) * 3), get_eviction("lru"))
    lookups = [(0, [0, 1]), (1, [2, 0]), (2, [3, 1]), (3, [0, 3])]
    hits = step_through(cache, [(s, 0, np.array(i, np.int32)) for s, i in lookups])
    assert hits == [[], [0], [1], [3]]
    assert cache.state["key_S"].tolist() == [3, 1, 0]
    assert cache.slot_LE.tolist() == [[2, 1, -1, 0, -1, -1]]


def test_lfu_hand_computed():
    """Step 2: 0 has two uses, 2 has one: 2 goes, so that step 3 hits twice."""
    cache = SlotCache(CacheSpec(1, 6, 2, (0,) * 3), get_eviction("lfu"))
    lookups = [(0, [0, 1]), (1, [2, 0]), (2, [3, 1]), (3, [0, 3])]
    hits = step_through(cache, [(s, 0, np.array(i, np.int32)) for s, i in lookups])
    assert hits == [[], [0], [1], [0, 3]]
    assert cache.state["key_S"].tolist() == [0, 1, 3]


@pytest.mark.parametrize("name", sorted(EVICTIONS))
@pytest.mark.parametrize("layer_S", [(-1,) * 7, (0, 0, 0, 1, 1, 1, 1), (0, 1, -1) * 2])
def test_cache_holds_its_laws_under_random_use(name, layer_S):
    """Both tables agree; slots keep to their layer; the running experts stay."""
    L, E, K, S = 2, 8, 3, len(layer_S)
    cache = SlotCache(CacheSpec(L, E, K, layer_S), eviction_of(name, L, E))
    rng = np.random.default_rng(1)
    for step in range(30):
        for layer in range(L):
            scores_TE = rng.random((1, E)).astype(np.float32)
            ids_TK = np.argsort(-scores_TE)[:, :K].astype(np.int32)
            kept = set(np.flatnonzero(rng.random(S) < 0.2).tolist())
            found = cache.look_up(layer, ids_TK, scores_TE, step)
            assert sorted([*found.hits, *found.misses]) == sorted(ids_TK[0])
            before_S = cache.state["key_S"].copy()
            admitted = [cache.admit(layer, e, kept) for e in found.misses]
            for expert, slot in zip(found.misses, admitted, strict=True):
                assert cache.slot_LE[layer, expert] == (-1 if slot is None else slot)
            assert cache.resident(layer)[found.hits].all()
            key_S = cache.state["key_S"]
            assert (key_S == before_S)[sorted(kept)].all()
            other = (layer + 1) % L
            if step % 3 == 0:  # a prefetch of the other layer moves none of these
                cache.admit(other, int(rng.integers(E)))
                assert cache.resident(layer)[found.hits].all()
            key_S = cache.state["key_S"]
            for slot, key in enumerate(key_S):
                if key >= 0:
                    assert cache.slot_LE[divmod(int(key), E)] == slot
                    assert layer_S[slot] in (-1, key // E)
            assert (cache.slot_LE >= 0).sum() == (key_S >= 0).sum()
            # The lists say the same, and that padding is nowhere.
            assert cache.rows == [[*row, -1] for row in cache.slot_LE.tolist()]


def test_look_up_orders_misses_by_best_score_then_rank():
    cache = SlotCache(CacheSpec(1, 6, 2, (0,) * 6), get_eviction("lru"))
    ids_TK = np.array([[4, 1], [2, 4], [6, 6]], np.int32)  # the last is padding
    scores_TE = np.zeros((3, 6), np.float32)
    scores_TE[0, [4, 1]] = 0.5, 0.3
    scores_TE[1, [2, 4]] = 0.6, 0.4
    scores_TE[2, 1] = 0.9  # of a padded token: does not count
    found = cache.look_up(0, ids_TK, scores_TE, 0)
    assert found.misses == [2, 4, 1]
    found = cache.look_up(0, ids_TK, None, 1)
    assert found.misses == [4, 2, 1]


def test_admit_running_experts_are_no_victims_until_release():
    cache = SlotCache(CacheSpec(1, 6, 4, (0, 0)), get_eviction("lru"))
    assert cache.look_up(0, ids_of(0, 1, 2, 3), None, 0).misses == [0, 1, 2, 3]
    assert [cache.admit(0, expert) for expert in range(4)] == [0, 1, None, None]
    cache.release()  # the first wave is computed
    assert cache.admit(0, 2) == 0
    assert cache.admit(0, 2) == 0  # already there
    assert cache.resident(0).tolist() == [False, True, True, False, False, False]


def test_admit_respects_protected_slots_and_reports_full():
    cache = SlotCache(CacheSpec(1, 6, 1, (0, 0, 0)), get_eviction("lru"))
    for expert in range(3):
        cache.admit(0, expert)
    assert cache.admit(0, 4, {0, 2}) == 1
    assert cache.admit(0, 5, {0, 1, 2}) is None
    assert cache.slot_LE.tolist() == [[0, -1, 2, -1, 1, -1]]


def test_drop_frees_the_slot_and_rejects_an_absent_block():
    cache = SlotCache(CacheSpec(2, 6, 1, (0, 0, 1)), get_eviction("lru"))
    cache.look_up(0, ids_of(3), None, 0)
    assert cache.admit(0, 3) == 0
    cache.drop(0, 3)
    assert not cache.resident(0).any()
    assert cache.admit(0, 5) == 0
    with pytest.raises(ConfigError, match="layer 0 expert 3 is in no slot"):
        cache.drop(0, 3)


def test_slots_of_own_and_shared_slots():
    cache = SlotCache(CacheSpec(2, 6, 1, (0, -1, 1)), get_eviction("lru"))
    assert cache.slots_of(0).tolist() == [True, True, False]
    assert cache.slots_of(1).tolist() == [False, True, True]
    assert [cache.admit(1, expert) for expert in (0, 1, 2)] == [1, 2, 1]
