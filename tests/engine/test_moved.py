"""What steps moved and changed, read after each of them: parts add up to the whole."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.engine.expert_state import Moved
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_counts import Counting
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.slots import RowSlots
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from tests.support.layered import StoreReader
from tests.support.running import GQA, SIZES, resident, row
from tests.support.slow_cases import slow_but

LOSSY = {"route": "substitute", "route_options": {"a": 0.5}}
CASES = {
    # So few slots that a choice of the last token has gone by the next.
    "layered": {"predictor": "previous", "device_memory": "30%"},
    "layered, lossy": LOSSY,
    "fused": {"mode": "fused"},
    "fused, lossy": {"mode": "fused", **LOSSY},
}


def less(after: Moved, before: Moved) -> Moved:
    return Moved(*(new - old for new, old in zip(after, before, strict=True)))


@pytest.mark.parametrize("name", slow_but(["layered", "fused, lossy"], CASES))
def test_steps_add_up_to_what_the_engine_counted(name):
    options = OffloadOptions(**{"device_memory": "50%"} | CASES[name])
    with make_offloaded(StoreReader(GQA), options) as engine:
        slots = RowSlots(engine, **SIZES)
        engine.reset_records()
        slots.admit([row("a", 9, 12, k=3), row("b", 20, 12, k=2)])
        steps, before = [], engine.moved()
        assert before == Moved() and before.bytes == 0
        while slots.is_busy:
            slots.step()
            now = engine.moved()
            steps.append(less(now, before))
            before = now
        total = Moved(*map(sum, zip(*steps, strict=True)))
        report = engine.report()
        assert total.bytes == report["bytes_moved"] > 0
        assert (total.prefetch_bytes > 0) == ("predictor" in CASES[name])
        if engine.lossless:
            assert total.routed == total.substituted == 0
        else:
            # The first token is the prompt's; 2 MoE layers.
            assert total.routed == report["choices"] == 2 * 11 * (3 + 2)
            assert 0 < total.substituted == report["rerouted"] < total.routed
            assert steps[0].routed == 0 and len(steps) == 14  # 3 of prompts
        engine.reset_records()
        assert engine.moved() == Moved()


def test_resident_engine_moves_nothing():
    assert resident("gqa").moved() == Moved() and resident("gqa").lossless


def test_counters_on_the_device_may_pass_the_end_of_their_type():
    def cache(misses: int, routed: int) -> Cache:
        counts = jnp.array([[0, misses, 0]], jnp.int32)
        return Cache(None, None, None, None, counts, jnp.array([routed, 0], jnp.int32))

    end = np.iinfo(np.int32).max
    device = DeviceCache(CacheSpec(1, 1, 1, (-1,)), get_eviction("lru"), (0,))
    counting = Counting(cache(end - 5, end - 7), 10, device)
    assert counting.moved(cache(end, end)) == Moved(50, routed=7)
    assert counting.moved(cache(-end - 1 + 3, -end - 1)) == Moved(90, routed=8)
