"""Experts that the host computes: the same sums by another order (gate B)."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.backends import HostBackend
from moe_edge.engine.generate import generate_rows
from moe_edge.engine.offload_options import ASSIST_RULES
from moe_edge.model.sampling import Sampling
from moe_edge.offload.link import Link
from moe_edge.offload.store import HostStore
from tests.support.layered import (
    CAPACITY,
    NINE,
    STEPS,
    THREE,
    StoreReader,
    forced_logits,
    layered,
    resident_logits,
)
from tests.support.tiny_models import ALL, BF16, GQA, random_prompts

SLOW = {"link_bytes_per_s": 2e6}  # 2 to 4 ms a block: the host is quicker


class KnownCost:
    """Costs that do not depend on how busy the machine is."""

    def __init__(self, mean_s):
        self.mean_s = mean_s

    def add(self, seconds):
        assert seconds > 0


def assert_gate_b(logits, expected):
    difference = np.abs(logits - expected).max()
    assert difference <= 1e-5 * expected.std()
    second, first = np.sort(expected, axis=-1)[..., -2:].transpose(2, 0, 1)
    decided = first - second > 10 * difference
    assert decided.mean() > 0.95
    same = logits.argmax(-1) == expected.argmax(-1)
    assert same[decided].all()


@pytest.mark.parametrize("rule", ASSIST_RULES)
@pytest.mark.parametrize(
    "name, dtype, lengths, slots",
    [
        ("gqa", BF16, NINE, 9),
        ("gqa", np.float32, THREE, 6),
        ("gpt_oss", BF16, NINE, 4),
    ],
)
def test_assisted_equals_resident_by_gate_b(name, dtype, lengths, slots, rule):
    plan = "equal" if slots == 4 else "one_pool"
    engine = layered(name, dtype, slots, slot_plan=plan, assist=rule, **SLOW)
    prompts = random_prompts(ALL[name], lengths)
    (host,) = engine.backends
    host.load, host.host = KnownCost(2e-3), KnownCost(1e-3)
    logits = forced_logits(engine, prompts)
    assert_gate_b(logits, resident_logits(name, dtype, lengths))
    assert engine.backends[0].computed > 8 or slots == 4


@pytest.mark.parametrize("horizon", [1, 3])
def test_assisted_with_prefetching_equals_resident(horizon):
    # Three layers: with horizon 3 a layer's own next choice is fetched ahead too.
    engine = layered(
        "gqa",
        BF16,
        assist="two_pointer",
        predictor="previous",
        horizon=horizon,
        **SLOW,
    )
    for _ in range(2):
        logits = forced_logits(engine, random_prompts(GQA, NINE))
        assert_gate_b(logits, resident_logits("gqa", BF16, NINE))
    assert engine.backends[0].computed > 8
    assert engine.manager.queue.stats().prefetch.count > 8


def test_assisted_prefill_is_exact_and_the_host_idle():
    engine = layered("gqa", BF16, assist="two_pointer")
    logits = forced_logits(engine, random_prompts(GQA, NINE), 1)[0]
    np.testing.assert_array_equal(logits, resident_logits("gqa", BF16, NINE)[0])


def test_what_the_host_computes_is_not_moved():
    plain, assisted = (
        layered("gqa", BF16, assist=assist, **SLOW) for assist in (None, "two_pointer")
    )
    for engine in (plain, assisted):
        forced_logits(engine, random_prompts(GQA, NINE))
    counters, stats = assisted.manager.counters, assisted.manager.queue.stats()
    misses = counters[True].misses + counters[False].misses
    assert stats.demand.count == misses - assisted.backends[0].computed
    assert stats.demand.bytes < plain.manager.queue.stats().demand.bytes


def test_what_the_host_computed_in_the_warm_up_is_not_counted():
    engine = layered("gqa", BF16, assist="two_pointer", with_trace=False, **SLOW)
    (host,) = engine.backends
    host.load, host.host = KnownCost(2e-3), KnownCost(1e-3)
    generate_rows(engine, random_prompts(GQA, NINE), CAPACITY - NINE[0], Sampling())
    report = engine.report()
    misses = report["decode"]["misses"] + report["prefill"]["misses"]
    fetched = report["transfers"]["demand"]["count"]
    assert report["host_computed"] == misses - fetched > 0
    engine.close()


def test_nothing_is_compiled_while_an_assisted_sequence_grows():
    engine = layered("gqa", BF16, assist="two_pointer", **SLOW)
    forced_logits(engine, random_prompts(GQA, NINE), STEPS)
    compiled = engine.num_compiled()
    forced_logits(engine, random_prompts(GQA, NINE), STEPS)
    assert engine.num_compiled() == compiled


@pytest.mark.parametrize(
    "rule, load_s, host_s, expected",
    [
        ("two_pointer", 1.0, 1.0, [7, 1]),
        ("two_pointer", 4.0, 1.0, [7, 1, 3]),
        ("two_pointer", 1.0, 9.0, [7]),
        ("fiddler", 2.0, 1.0, [5, 3, 1, 7]),
        ("fiddler", 1.0, 2.0, []),
    ],
)
def test_split_by_measured_costs(rule, load_s, host_s, expected):
    assist = HostBackend(GQA, HostStore(StoreReader(GQA)), Link(), rule)
    assist.load.add(load_s)
    assist.host.add(host_s)
    assert assist.take(0, [5, 3, 1, 7]) == expected


def test_unknown_rule_lists_the_known():
    with pytest.raises(ConfigError, match="'psychic'; known: fiddler, two_pointer"):
        HostBackend(GQA, HostStore(StoreReader(GQA)), Link(), "psychic")
