"""Layers in waves: more chosen experts than slots, and batches above `pairs`."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_edge.offload.lookup_runs import cut_runs
from moe_edge.route.base import Route
from moe_edge.simulate.replay.hits import replay
from moe_edge.simulate.replay.lookups import policy_of
from moe_edge.workload.traces import DECODE
from tests.support.layered import (
    CAPACITY,
    STEPS,
    THREE,
    assert_same_bits,
    layered,
)
from tests.support.prefetches import LazyLink
from tests.support.tiny_models import BF16

MANY = (4, 9) * 8 + (2,)  # one row more than `pairs` takes


@pytest.mark.parametrize(
    "ids, room, expected",
    [
        ([0, 1, 2, 3], 2, [(0, 2), (2, 4)]),
        ([0, 1, 0, 1, 2], 2, [(0, 4), (4, 5)]),
        ([0, 9, 1, 9, 2, 9], 2, [(0, 4), (4, 6)]),  # 9 is no expert
        ([0, 1, 2], 3, [(0, 3)]),
        ([9, 9], 2, [(0, 2)]),
        ([], 2, [(0, 0)]),
    ],
)
def test_segments_by_hand(ids, room, expected):
    assert cut_runs(np.array(ids, np.int32), 9, room) == expected


def test_segments_cover_all_pairs_and_fit():
    rng = np.random.default_rng(0)
    for room in (1, 2, 5):
        ids_P = rng.integers(0, 13, 60)
        runs = cut_runs(ids_P, 12, room)
        assert [0, *(end for _, end in runs)] == [first for first, _ in runs] + [60]
        for first, end in runs:
            assert len(set(ids_P[first:end].tolist()) - {12}) <= room


def test_batch_above_pairs_decodes_in_groups_of_experts():
    engine = layered("gqa", BF16, eviction="lfu")
    assert_same_bits(engine, "gqa", BF16, MANY, 12)
    counters, stats = engine.layer_step.counters, engine.queue.stats()
    assert counters[True].misses > 100 and counters[True].hits > 8
    # What is in a slot is computed first, so nothing is moved twice in a lookup.
    assert stats.demand.count == counters[True].misses + counters[False].misses


def test_hits_of_a_batch_beyond_its_slots_needed_no_transfer():
    # Three rows at a sixth of the experts: an expert that an earlier segment threw out
    # and that travelled again had counted as a hit.
    engine = layered("gqa", np.float32, 4)
    assert_same_bits(engine, "gqa", np.float32, THREE)
    counters, stats = engine.layer_step.counters, engine.queue.stats()
    assert stats.demand.count == counters[True].misses + counters[False].misses
    assert engine.layer_step.statistics.waves[True] > 12
    trace = engine.trace.trace()
    decode = trace.phase == DECODE
    wanted, fetched = 0, 0
    for step, layer in {*zip(trace.step[decode], trace.layer[decode], strict=True)}:
        here = decode & (trace.step == step) & (trace.layer == layer)
        ids, hits = trace.ids_TK[here], trace.hit_TK[here]
        wanted += len(set(ids.ravel().tolist()))
        fetched += len(set(ids[~hits].ravel().tolist()))
    assert counters[True].hits == wanted - fetched
    assert counters[True].misses > fetched  # some twice
    # Replay of the trace passes the same waves.
    result = replay(trace, policy_of("lru", trace), engine.cache.spec.layer_S)
    assert result.hits_L.sum() / wanted == pytest.approx(
        counters[True].hits / wanted, abs=0.02
    )


def test_a_predictor_that_waves_switch_off_is_said_to_be_off():
    engine = layered("gqa", np.float32, 2, predictor="previous")
    assert engine.remarks() == []
    assert_same_bits(engine, "gqa", np.float32, THREE, 2)
    (remark,) = engine.remarks()
    assert remark.startswith("4 decode layers ran in waves (more experts than slots")
    assert engine.report()["decode_layers_in_waves"] == 4


def test_waves_among_wrong_prefetches_keep_bits():
    # Three rows choose 3 to 9 experts: some lookups fit 6 slots, others do not.
    table = np.random.default_rng(0).integers(0, 12, (70, 3, 4))
    table[:, 0] = -1  # a dense layer
    options = {"predictor": "oracle", "predictor_options": {"chosen_SLK": table}}
    engine = layered("gqa", np.float32, 6, **options)
    engine.queue.carriers[0].link = LazyLink(5)
    assert_same_bits(engine, "gqa", np.float32, THREE)
    assert 20 < engine.layer_step.statistics.waves[True] < 2 * STEPS - 20
    stats = engine.queue.stats()
    assert stats.prefetch.count > 20 and stats.wasted_bytes > 0
    assert stats.cancelled > 10


@dataclasses.dataclass(frozen=True)
class NextExpert(Route):
    """Takes the expert after each chosen one: any rule that changes both arrays."""

    factor: float = 1.0
    name = "next"
    lossless = False

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        next_TK = np.where(ids_TK < 12, (ids_TK + 1) % 12, ids_TK)
        return next_TK.astype(np.int32), weights_TK * np.float32(self.factor)


def same_rows_logits(engine, rows, tokens=5):
    """Logits after one forced token: the same prompt in every row."""
    session = engine.new_session(rows, CAPACITY)
    engine.prefill(session, [[1, 2, 3]] * rows)
    active = jax.device_put(np.ones(rows, bool))
    out = [
        engine.decode(session, jax.device_put(np.full(rows, 7, np.int32)), active)
        for _ in range(tokens)
    ]
    return np.stack(jax.device_get(out))


def test_changed_routes_hold_in_every_form_of_a_layer():
    plain = same_rows_logits(layered("gqa", BF16), 1)
    moved = same_rows_logits(layered("gqa", BF16, route=NextExpert), 1)
    half = {"route": NextExpert, "route_options": {"factor": 0.5}}
    engine = layered("gqa", BF16, **half)
    alone = same_rows_logits(engine, 1)
    for other in (plain, moved):
        assert np.abs(alone - other).max() > 0.1 * plain.std()
    for row in same_rows_logits(engine, len(MANY)).swapaxes(0, 1):
        assert np.abs(row - alone[:, 0]).max() <= 1e-5 * alone.std()
